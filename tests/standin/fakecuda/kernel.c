// Modules and kernel launches.
#include <elf.h>
#include <string.h>
#include "fakecuda.h"

typedef struct {
    Object head;
    Context *context;
    int parameters;  // of its kernel
} Module;

// How many parameters the kernel in a cubin has: each has an entry in one of its sections.
static int parameters_in(const char *image) {
    static const char entry[] = {4, 0x17, 12, 0};  // EIATTR_KPARAM_INFO of 12 bytes
    const Elf64_Ehdr *file = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + file->e_shoff);
    const char *names = image + sections[file->e_shstrndx].sh_offset;
    int found = 0;
    for (int i = 0; i < file->e_shnum; i++) {
        if (strncmp(names + sections[i].sh_name, ".nv.info.", 9)) continue;
        const char *data = image + sections[i].sh_offset;
        for (size_t at = 0; at + 4 <= sections[i].sh_size; at += 4)
            found += !memcmp(data + at, entry, 4);
    }
    return found;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER_CONTEXT("cuModuleLoadData");
    *module = object_new(MODULE, sizeof(Module));
    current_context(&((Module *)*module)->context);
    if (!memcmp(image, ELFMAG, SELFMAG)) ((Module *)*module)->parameters = parameters_in(image);
    DONE(CUDA_SUCCESS);
}

CUresult cuModuleUnload(CUmodule module) {
    ENTER_CONTEXT("cuModuleUnload");
    if (!object_find(MODULE, module)) DONE(CUDA_ERROR_INVALID_VALUE);
    object_delete(module);
    DONE(CUDA_SUCCESS);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER_CONTEXT("cuModuleGetFunction");
    *function = (CUfunction)module;
    DONE(CUDA_SUCCESS);
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    ENTER_CONTEXT("cuFuncGetAttribute");
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    DONE(CUDA_SUCCESS);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    ENTER_CONTEXT("cuFuncSetAttribute");
    DONE(CUDA_SUCCESS);
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    ENTER_CONTEXT("cuFuncGetParamInfo");
    Module *module = object_find(MODULE, function);
    if (!module || (long)index >= module->parameters + fakecuda_more_parameters)
        DONE(CUDA_ERROR_INVALID_VALUE);
    *offset = 8 * index;
    if (size) *size = 8;
    DONE(CUDA_SUCCESS);
}

CUresult cuFuncLoad(CUfunction function) {
    ENTER_CONTEXT("cuFuncLoad");
    DONE(object_find(MODULE, function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    ENTER_CONTEXT("cuFuncSetCacheConfig");
    DONE(CUDA_SUCCESS);
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function,
                                      const CUlaunchConfig *config) {
    *count = 1;
    return CUDA_SUCCESS;
}

static void run_nothing(const Work *work) {}

#define MAP_MARK 0x7e50c0de7e50c0deull
#define MULTIPLE(value, of) ((cuuint64_t)(value) % (of) == 0)

// The limits are those of CUDA's documentation, for what is not interleaved.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *extents,
                                const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
    static const int spans[] = {256 * 8, 32, 64, 128};
    ENTER("cuTensorMapEncodeTiled");
    int good = MULTIPLE(map, 64) && address && MULTIPLE(address, 16) && rank >= 1 && rank <= 5 &&
               type < 10 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle < 4;
    for (cuuint32_t i = 0; good && i < rank; i++) {
        good = extents[i] >= 1 && extents[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256 &&
               steps[i] == 1;
        if (good && i + 1 < rank) good = MULTIPLE(strides[i], 16) && strides[i] < 1ull << 40;
    }
    if (good) {
        cuuint64_t inner = box[0] * sizes[type];
        good = MULTIPLE(inner, 16) && inner <= (cuuint64_t)spans[swizzle];
    }
    if (!good) DONE(CUDA_ERROR_INVALID_VALUE);
    memset(map, 0, sizeof *map);
    map->opaque[0] = (cuuint64_t)address;
    map->opaque[2] = MAP_MARK;
    DONE(CUDA_SUCCESS);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
    ENTER_CONTEXT("cuLaunchKernelEx");
    Module *module = object_find(MODULE, function);
    Context *context;
    current_context(&context);
    if (!module || module->context != context) DONE(CUDA_ERROR_INVALID_HANDLE);
    fakecuda_launches++;
    cuuint64_t *first = parameters[0];
    fakecuda_first_argument = (long)first[0];
    fakecuda_described = first[2] == MAP_MARK;
    DONE(submit(config->hStream, (Work){.run = run_nothing}));
}
