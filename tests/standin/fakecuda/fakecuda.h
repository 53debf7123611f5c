// A stand-in for libcuda.so.1 on machines without a GPU: what its files share.
//
// "Device" memory is memory of the process, exportable memory is a memfd, so that processes
// really share it. Work runs at once where it is queued; captured work runs when its graph is
// launched. Kernels are counted, not run. Handles are checked, and everything that exists is
// listed by fakecuda_live, so that tests see leaks, double frees and use after destruction.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "cuda.h"

#define GRANULARITY ((size_t)2 << 20)
#define MAX_DEVICES 16

typedef enum {
    CONTEXT, HANDLE, RESERVATION, MAPPING, POOL, ALLOCATION, HOST_MEMORY, STREAM, EVENT, GRAPH,
    EXECUTABLE, MODULE, KINDS
} Kind;

// Head of every object; live objects of a kind form a list.
typedef struct Object {
    Kind kind;
    struct Object *next;
} Object;

void *object_new(Kind kind, size_t bytes);
void *object_find(Kind kind, const void *object);  // NULL unless it is live
Object *object_first(Kind kind);
void object_delete(void *object);

typedef struct {
    Object head;
    int device;
    int references;
} Context;

extern int fakecuda_devices;  // settings that tests change; see core.c
extern int fakecuda_version;
extern int fakecuda_init_error;
extern int fakecuda_peer_access;
extern int fakecuda_identity;
extern int fakecuda_compute;
extern long fakecuda_memory;
extern long fakecuda_launches;
extern int fakecuda_device_used;
extern long fakecuda_first_argument;
extern int fakecuda_described;
extern int fakecuda_more_parameters;

// Counts the call; the error to return instead of doing it, or CUDA_SUCCESS.
CUresult enter(const char *verb);
void leave(void);
// As enter, for verbs that need a current context.
CUresult enter_context(const char *verb);
CUresult current_context(Context **context);
int capturing_anything(void);

// Every verb holds one lock from ENTER to DONE.
#define ENTER(verb)                                    \
    do {                                               \
        CUresult injected = enter(verb);               \
        if (injected != CUDA_SUCCESS) return injected; \
    } while (0)
#define ENTER_CONTEXT(verb)                            \
    do {                                               \
        CUresult injected = enter_context(verb);       \
        if (injected != CUDA_SUCCESS) return injected; \
    } while (0)
#define DONE(result)               \
    do {                           \
        CUresult done = (result);  \
        leave();                   \
        return done;               \
    } while (0)

// A piece of device work. Runs now, or becomes part of the graph that the stream records.
typedef struct Work {
    void (*run)(const struct Work *work);
    char *dst;
    const char *src;
    size_t dst_pitch, src_pitch, width, rows;
    int value;
} Work;

CUresult submit(CUstream stream, Work work);
// Whether the stream handle is live (the legacy stream is); and whether it records a graph.
int stream_known(CUstream stream);
int stream_captures(CUstream stream);
void stream_invalidate(CUstream stream);
