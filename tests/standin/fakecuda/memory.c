// Virtual memory on memfd and mmap, pools, pinned memory.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "fakecuda.h"

// Physical memory. It exists while a handle or a mapping refers to it.
typedef struct {
    int fd, references;
    size_t bytes;
    int own;  // allocated here, not imported: counts as device memory
    CUmemAllocationProp property;
} Physical;

typedef struct {
    Object head;
    Physical *physical;
} Handle;

typedef struct {
    Object head;
    uintptr_t start;
    size_t bytes;
    Physical *physical;  // of mappings only
} Range;

typedef struct {
    Object head;
    int destroyed;  // goes with its last allocation
    int allocations;
} Pool;

typedef struct {
    Object head;
    void *memory;
    size_t bytes;
    Pool *pool;
} Allocation;

static long used;  // bytes of device memory

static void release(Physical *physical) {
    if (--physical->references) return;
    if (physical->own) used -= physical->bytes;
    close(physical->fd);
    free(physical);
}

static Handle *new_handle(int fd, size_t bytes, int own) {
    Handle *handle = object_new(HANDLE, sizeof(Handle));
    handle->physical = calloc(1, sizeof(Physical));
    *handle->physical = (Physical){.fd = fd, .references = 1, .bytes = bytes, .own = own};
    return handle;
}

static Range *range_at(Kind kind, uintptr_t start, size_t bytes) {
    for (Object *object = object_first(kind); object; object = object->next) {
        Range *range = (Range *)object;
        if (range->start == start && range->bytes == bytes) return range;
    }
    return NULL;
}

static int overlaps(Kind kind, uintptr_t start, size_t bytes) {
    for (Object *object = object_first(kind); object; object = object->next) {
        Range *range = (Range *)object;
        if (start < range->start + range->bytes && range->start < start + bytes) return 1;
    }
    return 0;
}

static int reserved(uintptr_t start, size_t bytes) {
    for (Object *object = object_first(RESERVATION); object; object = object->next) {
        Range *range = (Range *)object;
        if (start >= range->start && start + bytes <= range->start + range->bytes) return 1;
    }
    return 0;
}

CUresult cuMemGetInfo(size_t *available, size_t *total) {
    ENTER_CONTEXT("cuMemGetInfo");
    *total = fakecuda_memory;
    *available = fakecuda_memory - used;
    DONE(CUDA_SUCCESS);
}

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *property,
                                       CUmemAllocationGranularity_flags option) {
    ENTER("cuMemGetAllocationGranularity");
    *size = GRANULARITY;
    DONE(CUDA_SUCCESS);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *property, unsigned long long flags) {
    ENTER("cuMemCreate");
    if (!bytes || bytes % GRANULARITY) DONE(CUDA_ERROR_INVALID_VALUE);
    if (used + (long)bytes > fakecuda_memory) DONE(CUDA_ERROR_OUT_OF_MEMORY);
    int fd = memfd_create("fakecuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes)) DONE(CUDA_ERROR_OPERATING_SYSTEM);
    used += bytes;
    Handle *made = new_handle(fd, bytes, 1);
    made->physical->property = *property;
    *handle = (uintptr_t)made;
    DONE(CUDA_SUCCESS);
}

static Range *mapping_of(uintptr_t address) {
    for (Object *object = object_first(MAPPING); object; object = object->next) {
        Range *range = (Range *)object;
        if (address >= range->start && address - range->start < range->bytes) return range;
    }
    return NULL;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER_CONTEXT("cuMemRetainAllocationHandle");
    Range *range = mapping_of((uintptr_t)address);
    if (!range) DONE(CUDA_ERROR_INVALID_VALUE);  // also memory of a pool
    Handle *made = object_new(HANDLE, sizeof(Handle));
    made->physical = range->physical;
    made->physical->references++;
    *handle = (uintptr_t)made;
    DONE(CUDA_SUCCESS);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *property,
                                                CUmemGenericAllocationHandle handle) {
    ENTER("cuMemGetAllocationPropertiesFromHandle");
    Handle *known = object_find(HANDLE, (void *)handle);
    if (!known) DONE(CUDA_ERROR_INVALID_VALUE);
    *property = known->physical->property;
    DONE(CUDA_SUCCESS);
}

CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
    ENTER_CONTEXT("cuMemGetAddressRange");
    Range *range = mapping_of(address);
    if (range) {
        *start = range->start;
        *bytes = range->bytes;
        DONE(CUDA_SUCCESS);
    }
    for (Object *object = object_first(ALLOCATION); object; object = object->next) {
        Allocation *allocation = (Allocation *)object;
        uintptr_t memory = (uintptr_t)allocation->memory;
        if (address < memory || address - memory >= allocation->bytes) continue;
        *start = memory;
        *bytes = allocation->bytes;
        DONE(CUDA_SUCCESS);
    }
    DONE(CUDA_ERROR_NOT_FOUND);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER("cuMemRelease");
    Handle *known = object_find(HANDLE, (void *)handle);
    if (!known) DONE(CUDA_ERROR_INVALID_VALUE);
    release(known->physical);
    object_delete(known);
    DONE(CUDA_SUCCESS);
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER("cuMemExportToShareableHandle");
    Handle *known = object_find(HANDLE, (void *)handle);
    if (!known) DONE(CUDA_ERROR_INVALID_VALUE);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) DONE(CUDA_ERROR_NOT_SUPPORTED);
    if (!(known->physical->property.requestedHandleTypes & type)) DONE(CUDA_ERROR_INVALID_VALUE);
    int fd = fcntl(known->physical->fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) DONE(CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    DONE(CUDA_SUCCESS);
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                        CUmemAllocationHandleType type) {
    ENTER("cuMemImportFromShareableHandle");
    struct stat status;
    int fd = fcntl((int)(uintptr_t)shared, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) DONE(CUDA_ERROR_OPERATING_SYSTEM);
    if (fstat(fd, &status)) {
        close(fd);
        DONE(CUDA_ERROR_INVALID_VALUE);
    }
    *handle = (uintptr_t)new_handle(fd, status.st_size, 0);
    DONE(CUDA_SUCCESS);
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                             CUdeviceptr wanted, unsigned long long flags) {
    ENTER("cuMemAddressReserve");
    if (!bytes || bytes % GRANULARITY) DONE(CUDA_ERROR_INVALID_VALUE);
    int flag = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *found = mmap(NULL, bytes + GRANULARITY, PROT_NONE, flag, -1, 0);
    if (found == MAP_FAILED) DONE(CUDA_ERROR_OUT_OF_MEMORY);
    uintptr_t start = ((uintptr_t)found + GRANULARITY - 1) & ~(GRANULARITY - 1);
    size_t before = start - (uintptr_t)found;
    if (before) munmap(found, before);
    if (before != GRANULARITY) munmap((char *)start + bytes, GRANULARITY - before);
    Range *range = object_new(RESERVATION, sizeof(Range));
    range->start = *address = start;
    range->bytes = bytes;
    DONE(CUDA_SUCCESS);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER("cuMemAddressFree");
    Range *range = range_at(RESERVATION, address, bytes);
    if (!range || overlaps(MAPPING, address, bytes)) DONE(CUDA_ERROR_INVALID_VALUE);
    munmap((void *)address, bytes);
    object_delete(range);
    DONE(CUDA_SUCCESS);
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER("cuMemMap");
    Handle *known = object_find(HANDLE, (void *)handle);
    if (!known || offset + bytes > known->physical->bytes || bytes % GRANULARITY ||
        address % GRANULARITY || !reserved(address, bytes) || overlaps(MAPPING, address, bytes))
        DONE(CUDA_ERROR_INVALID_VALUE);
    int flag = MAP_SHARED | MAP_FIXED;
    if (mmap((void *)address, bytes, PROT_NONE, flag, known->physical->fd, offset) == MAP_FAILED)
        DONE(CUDA_ERROR_OPERATING_SYSTEM);
    Range *range = object_new(MAPPING, sizeof(Range));
    range->start = address;
    range->bytes = bytes;
    range->physical = known->physical;
    range->physical->references++;
    DONE(CUDA_SUCCESS);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER("cuMemUnmap");
    Range *range = range_at(MAPPING, address, bytes);
    if (!range) DONE(CUDA_ERROR_INVALID_VALUE);
    int flag = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    mmap((void *)address, bytes, PROT_NONE, flag, -1, 0);
    release(range->physical);
    object_delete(range);
    DONE(CUDA_SUCCESS);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access,
                        size_t count) {
    ENTER("cuMemSetAccess");
    if (!range_at(MAPPING, address, bytes)) DONE(CUDA_ERROR_INVALID_VALUE);
    mprotect((void *)address, bytes, PROT_READ | PROT_WRITE);
    DONE(CUDA_SUCCESS);
}

// ---- pools and pinned memory

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    ENTER("cuMemPoolCreate");
    *pool = object_new(POOL, sizeof(Pool));
    DONE(CUDA_SUCCESS);
}

static void drop_pool(Pool *pool) {
    if (pool->destroyed && !pool->allocations) object_delete(pool);
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    ENTER("cuMemPoolDestroy");
    Pool *known = object_find(POOL, pool);
    if (!known || known->destroyed) DONE(CUDA_ERROR_INVALID_VALUE);
    known->destroyed = 1;
    drop_pool(known);
    DONE(CUDA_SUCCESS);
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    ENTER("cuMemPoolSetAttribute");
    DONE(CUDA_SUCCESS);
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    ENTER("cuMemPoolTrimTo");
    DONE(object_find(POOL, pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool,
                                 CUstream stream) {
    ENTER_CONTEXT("cuMemAllocFromPoolAsync");
    if (!bytes) DONE(CUDA_ERROR_INVALID_VALUE);
    if (!stream_known(stream)) DONE(CUDA_ERROR_INVALID_HANDLE);
    if (stream_captures(stream)) DONE(CUDA_ERROR_NOT_SUPPORTED);
    if (used + (long)bytes > fakecuda_memory) DONE(CUDA_ERROR_OUT_OF_MEMORY);
    Allocation *allocation = object_new(ALLOCATION, sizeof(Allocation));
    if (posix_memalign(&allocation->memory, 512, bytes)) abort();
    memset(allocation->memory, 0xa5, bytes);
    allocation->bytes = bytes;
    allocation->pool = (Pool *)pool;
    allocation->pool->allocations++;
    used += bytes;
    *address = (CUdeviceptr)allocation->memory;
    DONE(CUDA_SUCCESS);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    ENTER_CONTEXT("cuMemFreeAsync");
    if (!stream_known(stream)) DONE(CUDA_ERROR_INVALID_HANDLE);
    if (stream_captures(stream)) {  // only memory of the graph itself may be freed there
        stream_invalidate(stream);
        DONE(CUDA_ERROR_INVALID_VALUE);
    }
    for (Object *object = object_first(ALLOCATION); object; object = object->next) {
        Allocation *allocation = (Allocation *)object;
        if ((CUdeviceptr)allocation->memory != address) continue;
        Pool *pool = allocation->pool;
        used -= allocation->bytes;
        free(allocation->memory);
        object_delete(allocation);
        pool->allocations--;
        drop_pool(pool);
        DONE(CUDA_SUCCESS);
    }
    DONE(CUDA_ERROR_INVALID_VALUE);
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    ENTER_CONTEXT("cuMemHostAlloc");
    Allocation *allocation = object_new(HOST_MEMORY, sizeof(Allocation));
    if (posix_memalign(&allocation->memory, 4096, bytes)) abort();
    memset(allocation->memory, 0xa5, bytes);
    *address = allocation->memory;
    DONE(CUDA_SUCCESS);
}

CUresult cuMemFreeHost(void *address) {
    ENTER_CONTEXT("cuMemFreeHost");
    for (Object *object = object_first(HOST_MEMORY); object; object = object->next) {
        Allocation *allocation = (Allocation *)object;
        if (allocation->memory != address) continue;
        free(allocation->memory);
        object_delete(allocation);
        DONE(CUDA_SUCCESS);
    }
    DONE(CUDA_ERROR_INVALID_VALUE);
}
