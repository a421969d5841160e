/* As much of the CUDA runtime as ONNX Runtime's CUDA provider calls, over the host's memory: for machines without a device.
 *
 * The provider is the real one. Its kernels do nothing here, so only models that copy (Identity, Reshape) give true answers; what
 * is true for all is which calls are made, in what order, and what becomes of them. What is not defined here, the test's library
 * generates: it does nothing. The devices, and what is refused while a stream records, are in device.c.
 */
#include "emulated.h"

#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

enum { MAJOR = 9, PROCESSORS = 132 }; /* compute capability 9.0 */
enum { ON_HOST = 1, ON_DEVICE = 2, NON_BLOCKING = 1 };

typedef struct {
    int device;
    Work *first;
} Graph;

typedef struct Allocation {
    struct Allocation *next;
    char *bytes;
    size_t size;
    int device;
} Allocation;

typedef struct {
    int device;
    Stream *stream; /* where it was recorded last */
} Event;

typedef struct {
    unsigned x, y, z;
} Size;

typedef struct { /* cudaLaunchConfig_t */
    Size grid, block;
    size_t shared;
    void *stream;
} Launch;

typedef struct { /* cudaPointerAttributes */
    int type, device;
    const void *on_device, *on_host;
} Place;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation *allocations;
static int holds, breaks; /* what becomes of the next recording */
static size_t limit = SIZE_MAX;
static sem_t reached, go_on;

static int failure(void) { return emulated_failure(emulated_current()); }

/* Devices. */
int cudaGetDevice(int *device) { return *device = emulated_current(), failure(); }

int cudaSetDevice(int device) {
    if (!emulated_context(device)) return emulated_report(INVALID_DEVICE);
    return emulated_set_current(device), emulated_failure(device);
}

int cudaGetDeviceCount(int *count) { return (*count = emulated_count()) ? OK : emulated_report(NO_DEVICE); }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }
int cudaDriverGetVersion(int *version) { return *version = 13000, OK; }
int cudaPeekAtLastError(void) { return emulated_last_error(0); }
int cudaGetLastError(void) { return emulated_last_error(1); }
const char *cudaGetErrorName(int code) { return code ? "cudaError" : "cudaSuccess"; }
const char *cudaGetErrorString(int code) { return emulated_text(code); }

int cudaMemGetInfo(size_t *available, size_t *total) {
    int device = emulated_current();
    *total = emulated_total(device), *available = *total - emulated_used(device);
    return emulated_failure(device);
}

int cudaGetDeviceProperties(char *properties, int device) {
    if (!emulated_context(device)) return emulated_report(INVALID_DEVICE);
    memset(properties, 0, 900); /* of cudaDeviceProp in CUDA 13: */
    *(size_t *)(properties + 288) = emulated_total(device), *(size_t *)(properties + 296) = 49152;
    *(int *)(properties + 308) = 32, *(int *)(properties + 320) = 1024;
    *(int *)(properties + 360) = MAJOR, *(int *)(properties + 384) = PROCESSORS;
    return OK;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (!emulated_context(device)) return emulated_report(INVALID_DEVICE);
    return *value = attribute == 75 ? MAJOR : attribute == 76 ? 0 : attribute == 16 ? PROCESSORS : 1, OK;
}

int cudaDeviceSynchronize(void) {
    int code = emulated_is_refused("cudaDeviceSynchronize", 1), device = emulated_current();
    return code ? code : (emulated_finish_device(device), emulated_seen(device));
}

/* Memory. */
int cudaMalloc(void **pointer, size_t size) {
    int code = emulated_is_refused("cudaMalloc", 0), device = emulated_current();
    if (code) return code;
    if (size > limit || emulated_take(device, size)) return emulated_report(OUT_OF_MEMORY);
    Allocation *made = malloc(sizeof *made);
    *made = (Allocation){.bytes = aligned_alloc(256, (size + 511) / 256 * 256), .size = size, .device = device};
    *pointer = memset(made->bytes, 0, size);
    pthread_mutex_lock(&lock);
    made->next = allocations, allocations = made;
    pthread_mutex_unlock(&lock);
    return OK;
}

int cudaFree(void *pointer) { /* waits for the device */
    Allocation *found = NULL;
    int code = emulated_is_refused("cudaFree", 0);
    if (code || !pointer) return code;
    pthread_mutex_lock(&lock);
    for (Allocation **a = &allocations; *a && !found; a = found ? a : &(*a)->next)
        if ((*a)->bytes == pointer) found = *a, *a = found->next;
    pthread_mutex_unlock(&lock);
    if (!found) return emulated_report(INVALID_VALUE);
    if ((code = emulated_seen(found->device))) return code;
    emulated_finish_device(found->device), emulated_give(found->device, found->size);
    return free(found->bytes), free(found), OK;
}

int cudaHostAlloc(void **pointer, size_t size) {
    int code = emulated_is_refused("cudaHostAlloc", 0);
    if (code) return code;
    if (size > limit) return emulated_report(OUT_OF_MEMORY);
    *pointer = aligned_alloc(256, (size + 511) / 256 * 256);
    return memset(*pointer, 0, size), emulated_lock(*pointer, size);
}

int cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size); }

int cudaFreeHost(void *pointer) {
    int code = emulated_is_refused("cudaFreeHost", 0);
    return code ? code : (emulated_unlock(pointer), free(pointer), OK);
}

int cudaPointerGetAttributes(Place *place, const void *pointer) {
    *place = (Place){.type = emulated_is_locked(pointer) ? ON_HOST : 0, .device = emulated_current(), .on_host = pointer};
    pthread_mutex_lock(&lock);
    for (Allocation *a = allocations; a; a = a->next)
        if (a->bytes <= (char *)pointer && (char *)pointer < a->bytes + a->size) *place = (Place){ON_DEVICE, a->device, pointer, NULL};
    pthread_mutex_unlock(&lock);
    return failure();
}

int emulated_holds(const char *at, size_t size) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (Allocation *a = allocations; a; a = a->next) found |= a->bytes <= at && at + size <= a->bytes + a->size;
    pthread_mutex_unlock(&lock);
    return found;
}

static void say_copy(const Stream *s, size_t size, int kind, int is_pageable) {
    const char *way = kind == TO_DEVICE ? "to" : "from";
    emulated_say_on(s->device, "copy of %zu bytes %s the device, %s", size, way, is_pageable ? "pageable" : "locked");
}

int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
    Stream *s = emulated_stream(stream);
    Work work = {.target = target, .source = source, .size = size};
    const void *host = kind == TO_DEVICE ? source : kind == TO_HOST ? target : NULL;
    int is_pageable = host && !emulated_is_locked(host), code = emulated_work(s);
    if (code || (!stream && (code = emulated_legacy(s->device)))) return code;
    if (host) say_copy(s, size, kind, is_pageable);
    if (is_pageable && s->capturing) /* the copy would wait for the stream */
        return s->is_broken = 1, emulated_say("pageable copy: refused, as its stream records"), emulated_report(CAPTURE_UNSUPPORTED);
    if (kind == TO_DEVICE && is_pageable) work.staged = memcpy(malloc(size + 1), source, size);
    if (host && !s->capturing) emulated_copy_takes(s, kind, size, is_pageable);
    emulated_append(s, work);
    if (kind == TO_HOST && is_pageable) return emulated_finish(s), emulated_seen(s->device);
    return OK;
}

int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    Stream *s = emulated_stream(NULL);
    int code = emulated_is_refused("cudaMemcpy", 0);
    if (code || (code = emulated_legacy(s->device)) || (code = emulated_seen(s->device))) return code;
    say_copy(s, size, kind, !emulated_is_locked(kind == TO_DEVICE ? source : target));
    if (kind == TO_DEVICE || kind == TO_HOST) emulated_copy_takes(s, kind, size, 1);
    return memcpy(target, source, size), OK;
}

int cudaMemsetAsync(void *target, int value, size_t size, void *stream) {
    Stream *s = emulated_stream(stream);
    int code = emulated_work(s);
    if (!code && !s->capturing) emulated_finish(s), memset(target, value, size);
    return code;
}

/* Streams and events. */
int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    return *stream = emulated_make_stream(!(flags & NON_BLOCKING)), failure();
}

int cudaStreamCreate(void **stream) { return cudaStreamCreateWithFlags(stream, 0); }
int cudaStreamDestroy(void *stream) { return emulated_destroy_stream(stream), OK; }

int cudaStreamSynchronize(void *stream) {
    Stream *s = emulated_stream(stream);
    int code = emulated_failure(s->device);
    if (code || (!stream && (code = emulated_legacy(s->device)))) return code;
    if (s->capturing) return s->is_broken = 1, emulated_say("a wait for a stream that records"), emulated_report(CAPTURE_UNSUPPORTED);
    return emulated_finish(s), emulated_seen(s->device);
}

int cudaStreamIsCapturing(void *stream, int *status) { return *status = emulated_stream(stream)->capturing, OK; }

int cudaEventCreateWithFlags(Event **event) {
    *event = malloc(sizeof **event);
    return **event = (Event){.device = emulated_current()}, failure();
}

int cudaEventCreate(Event **event) { return cudaEventCreateWithFlags(event); }
int cudaEventDestroy(Event *event) { return free(event), OK; }

int cudaEventRecord(Event *event, void *stream) {
    Stream *s = emulated_stream(stream);
    if (event->device != s->device) return emulated_report(INVALID_HANDLE);
    return event->stream = s, emulated_failure(s->device);
}

int cudaEventRecordWithFlags(Event *event, void *stream) { return cudaEventRecord(event, stream); }

int cudaEventSynchronize(Event *event) {
    if (event->stream) emulated_finish(event->stream);
    return emulated_seen(event->device);
}

int cudaStreamWaitEvent(void *stream, Event *event) { /* the work before the event is done now, which is early enough */
    if (event->stream && event->stream != stream) emulated_finish(event->stream);
    return failure();
}

int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    return emulated_append(emulated_stream(stream), (Work){.function = function, .data = data}), OK;
}

/* Recordings. */
int cudaStreamBeginCapture(void *stream, int mode) {
    Stream *s = emulated_stream(stream);
    if (!stream) return emulated_report(CAPTURE_UNSUPPORTED);
    emulated_finish(s);
    s->mode = mode, s->is_broken = breaks, breaks = 0, s->owner = pthread_self(), s->capturing = 1;
    return emulated_say("capture begins"), OK;
}

int cudaStreamEndCapture(void *stream, Graph **graph) {
    Stream *s = emulated_stream(stream);
    if (holds) holds = 0, sem_post(&reached), sem_wait(&go_on);
    s->capturing = 0;
    emulated_say(s->is_broken ? "capture ends, broken" : "capture ends");
    *graph = s->is_broken ? NULL : malloc(sizeof **graph);
    if (*graph) **graph = (Graph){s->device, s->first};
    s->first = NULL, s->last = &s->first;
    return *graph ? OK : emulated_report(CAPTURE_INVALIDATED);
}

int cudaGraphInstantiate(Graph **executable, Graph *graph) {
    *executable = malloc(sizeof *graph);
    return **executable = *graph, OK;
}

int cudaGraphDestroy(Graph *graph) { return free(graph), OK; }

int cudaGraphExecDestroy(Graph *executable) {
    int code = emulated_is_refused("cudaGraphExecDestroy", 0);
    return code ? code : (free(executable), OK);
}

int cudaGraphLaunch(Graph *executable, void *stream) {
    Stream *s = emulated_stream(stream);
    int code = s->device == executable->device ? emulated_work(s) : emulated_report(INVALID_HANDLE);
    if (code) return code;
    emulated_finish(s), emulated_say("replay");
    for (Work *work = executable->first; work; work = work->next) emulated_append(s, *work);
    return OK;
}

/* Kernels. */
static __thread void *next_stream; /* of `kernel<<<grid, block, shared, stream>>>()`, which is a push, a pop and a launch */
unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, void *stream) { return next_stream = stream, OK; }

int __cudaPopCallConfiguration(Size *grid, Size *block, size_t *shared, void **stream) {
    *grid = *block = (Size){1, 1, 1};
    return *shared = 0, *stream = next_stream, OK;
}

static int launch(void *stream) {
    Stream *s = emulated_stream(stream);
    if (s->device != emulated_current()) return emulated_say_on(s->device, "kernel: refused, as another device is current"), emulated_report(INVALID_HANDLE);
    int code = stream ? OK : emulated_legacy(s->device);
    return code ? code : emulated_work(s);
}

int cudaLaunchKernel(void *kernel, Size grid, Size block, void **arguments, size_t shared, void *stream) { return launch(stream); }
int __cudaLaunchKernel(void *kernel, Size grid, Size block, void **arguments, size_t shared, void *stream) { return launch(stream); }
int cudaLaunchKernelExC(const Launch *how) { return launch(how->stream); }
int cudaFuncGetAttributes(void *attributes) { return memset(attributes, 0, 64), OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { return *blocks = 1, OK; }

void **__cudaRegisterFatBinary(void) {
    static void *one;
    return &one;
}

/* Not CUDA's: what a test does. */
void emulated_limit(size_t bytes) { limit = bytes; } /* of one allocation */
void emulated_break(void) { breaks = 1; }            /* the next recording, as an operator does that waits for the device */
void emulated_hold(void) { holds = 1; }              /* the next recording, until it is let go on */
void emulated_wait_until_held(void) { sem_wait(&reached); }
void emulated_go_on(void) { sem_post(&go_on); }
