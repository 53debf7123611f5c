// Streams, events and graphs.
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "fakecuda.h"

typedef struct {
    Object head;
    Work *work;
    size_t count;
    int invalid;
    cuuint64_t number;
} Graph;

typedef struct {
    Object head;
    Context *context;
    Graph *capture;  // what the stream records
    int origin;      // the recording began here
    int unjoined;    // it holds recorded work that no other recorded work waits for
} Stream;

typedef struct {
    Object head;
    Context *context;
    Graph *capture;  // its last record was recorded, not run
    Stream *source;
    int timing;
    double milliseconds;
} Event;

static Stream *capturing_stream(CUstream stream) {
    Stream *known = object_find(STREAM, stream);
    return known && known->capture ? known : NULL;
}

static Context *here(void) {
    Context *context;
    return current_context(&context) == CUDA_SUCCESS ? context : NULL;
}

int stream_known(CUstream stream) {
    if ((uintptr_t)stream <= 2) {  // the default streams, of the context that is current
        if (here()) fakecuda_device_used = here()->device;
        return 1;
    }
    Stream *known = object_find(STREAM, stream);
    return known && known->context == here();
}

static CUstream new_stream(void) {
    Stream *made = object_new(STREAM, sizeof(Stream));
    made->context = here();
    return (CUstream)made;
}

int stream_captures(CUstream stream) { return capturing_stream(stream) != NULL; }

void stream_invalidate(CUstream stream) {
    Stream *known = capturing_stream(stream);
    if (known) known->capture->invalid = 1;
}

int capturing_anything(void) {
    for (Object *object = object_first(STREAM); object; object = object->next)
        if (((Stream *)object)->capture) return 1;
    return 0;
}

static void run_graph(const Work *work) {
    const Graph *graph = (const Graph *)work->src;
    for (size_t i = 0; i < graph->count; i++) graph->work[i].run(&graph->work[i]);
}

CUresult submit(CUstream stream, Work work) {
    if (!stream_known(stream)) return CUDA_ERROR_INVALID_HANDLE;
    Stream *known = capturing_stream(stream);
    if (!known) {
        work.run(&work);
        return CUDA_SUCCESS;
    }
    Graph *graph = known->capture;
    if (graph->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    graph->work = realloc(graph->work, (graph->count + 1) * sizeof(Work));
    graph->work[graph->count++] = work;
    known->unjoined = 1;
    return CUDA_SUCCESS;
}

// ---- streams

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    ENTER_CONTEXT("cuStreamCreateWithPriority");
    *stream = new_stream();
    DONE(CUDA_SUCCESS);
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    ENTER_CONTEXT("cuStreamCreate");
    *stream = new_stream();
    DONE(CUDA_SUCCESS);
}

CUresult cuStreamDestroy(CUstream stream) {
    ENTER_CONTEXT("cuStreamDestroy");
    Stream *known = object_find(STREAM, stream);
    if (!known) DONE(CUDA_ERROR_INVALID_HANDLE);
    object_delete(known);
    DONE(CUDA_SUCCESS);
}

static CUresult look_at(const char *verb, CUstream stream) {
    ENTER_CONTEXT(verb);
    if (!stream_known(stream)) DONE(CUDA_ERROR_INVALID_HANDLE);
    if (!stream_captures(stream)) DONE(CUDA_SUCCESS);
    stream_invalidate(stream);
    DONE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

CUresult cuStreamSynchronize(CUstream stream) { return look_at("cuStreamSynchronize", stream); }

CUresult cuStreamQuery(CUstream stream) { return look_at("cuStreamQuery", stream); }

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER_CONTEXT("cuStreamWaitEvent");
    Event *known = object_find(EVENT, event);
    if (!known || !stream_known(stream)) DONE(CUDA_ERROR_INVALID_HANDLE);
    Stream *waiting = object_find(STREAM, stream);
    if (known->capture && waiting && waiting != known->source) {
        if (!waiting->capture) waiting->capture = known->capture;
        if (object_find(STREAM, known->source)) known->source->unjoined = 0;
        waiting->unjoined = 1;
    }
    DONE(CUDA_SUCCESS);
}

// ---- events

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER_CONTEXT("cuEventCreate");
    Event *made = object_new(EVENT, sizeof(Event));
    made->context = here();
    made->timing = !(flags & CU_EVENT_DISABLE_TIMING);
    *event = (CUevent)made;
    DONE(CUDA_SUCCESS);
}

CUresult cuEventDestroy(CUevent event) {
    ENTER_CONTEXT("cuEventDestroy");
    Event *known = object_find(EVENT, event);
    if (!known) DONE(CUDA_ERROR_INVALID_HANDLE);
    object_delete(known);
    DONE(CUDA_SUCCESS);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER_CONTEXT("cuEventRecord");
    Event *known = object_find(EVENT, event);
    if (!known || known->context != here() || !stream_known(stream))
        DONE(CUDA_ERROR_INVALID_HANDLE);
    known->source = capturing_stream(stream);
    known->capture = known->source ? known->source->capture : NULL;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    known->milliseconds = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
    DONE(CUDA_SUCCESS);
}

static CUresult look_at_event(const char *verb, CUevent event) {
    ENTER_CONTEXT(verb);
    Event *known = object_find(EVENT, event);
    if (!known) DONE(CUDA_ERROR_INVALID_HANDLE);
    DONE(known->capture ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS);
}

CUresult cuEventQuery(CUevent event) { return look_at_event("cuEventQuery", event); }

CUresult cuEventSynchronize(CUevent event) { return look_at_event("cuEventSynchronize", event); }

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    ENTER_CONTEXT("cuEventElapsedTime");
    Event *from = object_find(EVENT, start), *to = object_find(EVENT, end);
    if (!from || !to || !from->timing || !to->timing) DONE(CUDA_ERROR_INVALID_HANDLE);
    *milliseconds = (float)(to->milliseconds - from->milliseconds);
    DONE(CUDA_SUCCESS);
}

// ---- graphs

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    ENTER_CONTEXT("cuStreamBeginCapture");
    Stream *known = object_find(STREAM, stream);
    if (!known || known->capture) DONE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    static cuuint64_t number;
    known->capture = object_new(GRAPH, sizeof(Graph));
    known->capture->number = ++number;
    known->origin = 1;
    DONE(CUDA_SUCCESS);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    ENTER_CONTEXT("cuStreamEndCapture");
    Stream *origin = capturing_stream(stream);
    if (!origin || !origin->origin) DONE(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    Graph *recorded = origin->capture;
    int unjoined = 0;
    for (Object *object = object_first(STREAM); object; object = object->next) {
        Stream *other = (Stream *)object;
        if (other->capture != recorded) continue;
        unjoined |= other != origin && other->unjoined;
        other->capture = NULL;
        other->unjoined = other->origin = 0;
    }
    *graph = NULL;
    if (recorded->invalid || unjoined) {
        int invalid = recorded->invalid;
        free(recorded->work);
        object_delete(recorded);
        DONE(invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    }
    *graph = (CUgraph)recorded;
    DONE(CUDA_SUCCESS);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    ENTER_CONTEXT("cuStreamIsCapturing");
    if (!stream_known(stream)) DONE(CUDA_ERROR_INVALID_HANDLE);
    Stream *known = capturing_stream(stream);
    *status = !known                   ? CU_STREAM_CAPTURE_STATUS_NONE
              : known->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                        : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    DONE(CUDA_SUCCESS);
}

// By an own name: headers declare the function of that name with one list of arguments or another.
CUresult capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *number,
                      CUgraph *graph, const CUgraphNode **nodes, const CUgraphEdgeData **edges,
                      size_t *count) __asm__("cuStreamGetCaptureInfo");

CUresult capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *number,
                      CUgraph *graph, const CUgraphNode **nodes, const CUgraphEdgeData **edges,
                      size_t *count) {
    ENTER_CONTEXT("cuStreamGetCaptureInfo");
    if (!stream_known(stream)) DONE(CUDA_ERROR_INVALID_HANDLE);
    Stream *known = capturing_stream(stream);
    *status = known && !known->capture->invalid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                : CU_STREAM_CAPTURE_STATUS_NONE;
    if (number) *number = known ? known->capture->number : 0;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    DONE(CUDA_SUCCESS);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph,
                                     unsigned long long flags) {
    ENTER_CONTEXT("cuGraphInstantiate");
    Graph *known = object_find(GRAPH, graph);
    if (!known) DONE(CUDA_ERROR_INVALID_VALUE);
    Graph *copy = object_new(EXECUTABLE, sizeof(Graph));
    copy->count = known->count;
    copy->work = malloc(known->count * sizeof(Work) + 1);
    if (known->count) memcpy(copy->work, known->work, known->count * sizeof(Work));
    *executable = (CUgraphExec)copy;
    DONE(CUDA_SUCCESS);
}

static CUresult destroy(const char *verb, Kind kind, void *graph) {
    ENTER_CONTEXT(verb);
    Graph *known = object_find(kind, graph);
    if (!known) DONE(CUDA_ERROR_INVALID_VALUE);
    free(known->work);
    object_delete(known);
    DONE(CUDA_SUCCESS);
}

CUresult cuGraphDestroy(CUgraph graph) { return destroy("cuGraphDestroy", GRAPH, graph); }

CUresult cuGraphExecDestroy(CUgraphExec executable) {
    return destroy("cuGraphExecDestroy", EXECUTABLE, executable);
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    ENTER_CONTEXT("cuGraphLaunch");
    if (!object_find(EXECUTABLE, executable)) DONE(CUDA_ERROR_INVALID_VALUE);
    DONE(submit(stream, (Work){.run = run_graph, .src = (const char *)executable}));
}
