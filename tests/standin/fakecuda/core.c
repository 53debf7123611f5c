// Settings, injected failures, the list of live objects, and the lookup of verbs by name.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "fakecuda.h"

int fakecuda_devices = 8;
int fakecuda_version = 13000;
int fakecuda_init_error = 0;   // what cuInit returns
int fakecuda_peer_access = 1;  // GPUs so far apart, or a multiple, reach each other; 0: none do
int fakecuda_identity = -1;    // of all GPUs; -1: each has its own
int fakecuda_compute = 90;     // compute capability
long fakecuda_memory = 8l << 30;  // bytes of device memory
long fakecuda_launches = 0;       // kernels launched or recorded
long fakecuda_first_argument = 0; // address in the first argument of the last launch,
int fakecuda_described = 0;       // and whether that is a tensor map
int fakecuda_more_parameters = 0; // than a kernel has, the driver says
int fakecuda_device_used = -1;    // whose default stream was used last, or all of whose work was
                                  // waited for
long fakecuda_calls_after_fork = 0;

#define MAX_VERBS 256
static struct {
    const char *name;
    long calls;
} verbs[MAX_VERBS];
static int verb_count;
static char failing_verb[64];
static long failing_call;
static CUresult failing_code;
static int owner;  // process that called cuInit
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Object *live[KINDS];
static const char *kind_names[KINDS] = {
    "contexts", "handles", "reservations", "mappings", "pools", "allocations", "host_memory",
    "streams", "events", "graphs", "executables", "modules",
};

static long count_call(const char *verb) {
    int i = 0;
    while (i < verb_count && strcmp(verbs[i].name, verb)) i++;
    if (i == MAX_VERBS) abort();
    if (i == verb_count) verbs[verb_count++].name = verb;
    return ++verbs[i].calls;
}

CUresult enter(const char *verb) {
    pthread_mutex_lock(&lock);
    CUresult result = CUDA_SUCCESS;
    if (!strcmp(verb, "cuInit")) {
        owner = getpid();
    } else if (!strcmp(verb, "cuDriverGetVersion")) {
        ;  // works before cuInit
    } else if (!owner) {
        result = CUDA_ERROR_NOT_INITIALIZED;
    } else if (owner != getpid()) {
        fakecuda_calls_after_fork++;
        result = CUDA_ERROR_NOT_INITIALIZED;
    }
    long call = count_call(verb);
    if (call == failing_call && !strcmp(verb, failing_verb)) result = failing_code;
    if (result != CUDA_SUCCESS) pthread_mutex_unlock(&lock);
    return result;
}

CUresult enter_context(const char *verb) {
    CUresult result = enter(verb);
    if (result != CUDA_SUCCESS) return result;
    Context *context;
    result = current_context(&context);
    if (result != CUDA_SUCCESS) pthread_mutex_unlock(&lock);
    return result;
}

void leave(void) { pthread_mutex_unlock(&lock); }

// ---- what tests call

// The `call`th call of `verb` from now on returns `code`; 0: none does. Starts counting anew.
void fakecuda_fail(const char *verb, long call, int code) {
    pthread_mutex_lock(&lock);
    snprintf(failing_verb, sizeof failing_verb, "%s", verb);
    failing_call = call;
    failing_code = code;
    verb_count = 0;
    memset(verbs, 0, sizeof verbs);
    pthread_mutex_unlock(&lock);
}

// "verb calls" lines since fakecuda_fail, in order of first call.
void fakecuda_calls(char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < verb_count && used < size; i++)
        used += snprintf(text + used, size - used, "%s %ld\n", verbs[i].name, verbs[i].calls);
}

// "kind number" lines of what exists.
void fakecuda_live(char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        int number = 0;
        for (Object *object = live[kind]; object; object = object->next) number++;
        if (number && used < size)
            used += snprintf(text + used, size - used, "%s %d\n", kind_names[kind], number);
    }
}

// ---- objects

void *object_new(Kind kind, size_t bytes) {
    Object *object = calloc(1, bytes);
    if (!object) abort();
    object->kind = kind;
    object->next = live[kind];
    live[kind] = object;
    return object;
}

Object *object_first(Kind kind) { return live[kind]; }

void *object_find(Kind kind, const void *wanted) {
    for (Object *object = live[kind]; object; object = object->next)
        if (object == wanted) return object;
    return NULL;
}

void object_delete(void *given) {
    Object *object = given;
    Object **link = &live[object->kind];
    while (*link != object) link = &(*link)->next;
    *link = object->next;
    free(object);
}

// ---- errors and lookup

#define NAMES(X)                                                                             \
    X(CUDA_SUCCESS) X(CUDA_ERROR_INVALID_VALUE) X(CUDA_ERROR_OUT_OF_MEMORY)                  \
    X(CUDA_ERROR_NOT_INITIALIZED) X(CUDA_ERROR_NO_DEVICE) X(CUDA_ERROR_INVALID_DEVICE)       \
    X(CUDA_ERROR_INVALID_CONTEXT) X(CUDA_ERROR_NOT_FOUND) X(CUDA_ERROR_NOT_READY)            \
    X(CUDA_ERROR_INVALID_HANDLE) X(CUDA_ERROR_CONTEXT_IS_DESTROYED)                          \
    X(CUDA_ERROR_NOT_PERMITTED) X(CUDA_ERROR_NOT_SUPPORTED) X(CUDA_ERROR_UNKNOWN)            \
    X(CUDA_ERROR_OPERATING_SYSTEM) X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)                      \
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)        \
    X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED) X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED)             \
    X(CUDA_ERROR_CAPTURED_EVENT) X(CUDA_ERROR_ILLEGAL_ADDRESS)                               \
    X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)

CUresult cuGetErrorName(CUresult error, const char **text) {
    switch ((int)error) {
#define CASE(name) case name: *text = #name; return CUDA_SUCCESS;
        NAMES(CASE)
    default: *text = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    return cuGetErrorName(error, text);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    static void *self;
    if (!self) {
        Dl_info info;
        dladdr((void *)cuGetProcAddress_v2, &info);
        self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    // a verb of a later CUDA is not in an older driver
    int missing = version > fakecuda_version;
    char name[128];
    *function = NULL;
    for (int i = 0; i < 2 && !*function && !missing; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, i ? "" : "_v2");
        *function = dlsym(self, name);
    }
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
