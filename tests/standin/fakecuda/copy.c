// Copies, and what a pointer is asked.
#include <string.h>
#include "fakecuda.h"

static void copy_rows(const Work *work) {
    for (size_t row = 0; row < work->rows; row++)
        memmove(work->dst + row * work->dst_pitch, work->src + row * work->src_pitch, work->width);
}

static void fill(const Work *work) { memset(work->dst, work->value, work->width); }

static CUresult copy(const char *verb, CUdeviceptr dst, const void *src, size_t bytes,
                     CUstream stream) {
    ENTER_CONTEXT(verb);
    Work work = {.run = copy_rows, .dst = (char *)dst, .src = src, .width = bytes, .rows = 1};
    DONE(submit(stream, work));
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyAsync", dst, (void *)src, bytes, stream);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyHtoDAsync", dst, src, bytes, stream);
}

CUresult cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyDtoHAsync", (CUdeviceptr)dst, (void *)src, bytes, stream);
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *piece, CUstream stream) {
    ENTER_CONTEXT("cuMemcpy2DAsync");
    if (piece->dstPitch < piece->WidthInBytes || piece->srcPitch < piece->WidthInBytes)
        DONE(CUDA_ERROR_INVALID_VALUE);
    Work work = {
        .run = copy_rows, .dst = (char *)piece->dstDevice, .src = (char *)piece->srcDevice,
        .dst_pitch = piece->dstPitch, .src_pitch = piece->srcPitch,
        .width = piece->WidthInBytes, .rows = piece->Height,
    };
    DONE(submit(stream, work));
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream) {
    ENTER_CONTEXT("cuMemsetD8Async");
    Work work = {.run = fill, .dst = (char *)dst, .width = bytes, .value = value};
    DONE(submit(stream, work));
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER_CONTEXT("cuPointerGetAttribute");
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)out = address;
    else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)out = CU_MEMORYTYPE_DEVICE;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
        Context *context;
        current_context(&context);
        *(int *)out = context->device;
    } else
        DONE(CUDA_ERROR_INVALID_VALUE);
    DONE(CUDA_SUCCESS);
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **out,
                                CUdeviceptr address) {
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = cuPointerGetAttribute(out[i], attributes[i], address);
    return result;
}
