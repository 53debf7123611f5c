// Devices and contexts.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "fakecuda.h"

static Context *primary[MAX_DEVICES];
static __thread Context *bound;

CUresult current_context(Context **context) {
    *context = bound;
    if (!bound) return CUDA_ERROR_INVALID_CONTEXT;
    return object_find(CONTEXT, bound) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult cuInit(unsigned flags) {
    ENTER("cuInit");
    if (fakecuda_init_error) DONE(fakecuda_init_error);
    DONE(fakecuda_devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE);
}

CUresult cuDriverGetVersion(int *version) {
    ENTER("cuDriverGetVersion");
    *version = fakecuda_version;
    DONE(CUDA_SUCCESS);
}

CUresult cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount");
    *count = fakecuda_devices;
    DONE(CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER("cuDeviceGet");
    if (ordinal < 0 || ordinal >= fakecuda_devices) DONE(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    DONE(CUDA_SUCCESS);
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    ENTER("cuDeviceGetName");
    snprintf(name, size, "Stand-in GPU");
    DONE(CUDA_SUCCESS);
}

#undef cuDeviceGetUuid
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER("cuDeviceGetUuid");
    memset(uuid, 0x5d, sizeof *uuid);
    uuid->bytes[0] = (char)(fakecuda_identity < 0 ? device : fakecuda_identity);
    DONE(CUDA_SUCCESS);
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    ENTER("cuDeviceTotalMem");
    *bytes = fakecuda_memory;
    DONE(CUDA_SUCCESS);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER("cuDeviceCanAccessPeer");
    *can = fakecuda_peer_access && device != peer && !((device - peer) % fakecuda_peer_access);
    DONE(CUDA_SUCCESS);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute");
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = fakecuda_compute / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = fakecuda_compute % 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 1;
    }
    DONE(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain");
    if (device < 0 || device >= fakecuda_devices) DONE(CUDA_ERROR_INVALID_DEVICE);
    if (!primary[device]) {
        primary[device] = object_new(CONTEXT, sizeof(Context));
        primary[device]->device = device;
    }
    primary[device]->references++;
    *context = (CUcontext)primary[device];
    DONE(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER("cuDevicePrimaryCtxRelease");
    if (!primary[device]) DONE(CUDA_ERROR_INVALID_CONTEXT);
    if (--primary[device]->references == 0) {
        object_delete(primary[device]);
        primary[device] = NULL;
    }
    DONE(CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER("cuCtxGetCurrent");
    *context = (CUcontext)bound;
    DONE(CUDA_SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER("cuCtxSetCurrent");
    if (context && !object_find(CONTEXT, context)) DONE(CUDA_ERROR_INVALID_CONTEXT);
    bound = (Context *)context;
    DONE(CUDA_SUCCESS);
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER_CONTEXT("cuCtxGetDevice");
    *device = bound->device;
    DONE(CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void) {
    ENTER_CONTEXT("cuCtxSynchronize");
    fakecuda_device_used = bound->device;
    DONE(capturing_anything() ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS);
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 1 << 20;
    return CUDA_SUCCESS;
}
