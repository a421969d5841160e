/* As much of the CUDA runtime as ONNX Runtime's CUDA provider calls, over the host's memory: for machines without a device.
 *
 * The provider is the real one. Its kernels do nothing here, so only models that copy (Identity, Reshape) give true answers; what
 * is true for all is which calls are made, in what order, and what becomes of them. Copies from and to locked memory happen when
 * their stream is waited for, at the last possible moment. Calls that a thread must not make while another one records are
 * refused, and break the recording: see cudaThreadExchangeStreamCaptureMode, and "Prohibited and Unhandled Operations" in the
 * CUDA programming guide. What is not defined here, the test's library generates: it does nothing. One device.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, OUT_OF_MEMORY = 2, OLD_DRIVER = 35, INVALID_DEVICE = 101, ILLEGAL_ADDRESS = 700 };
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
enum { MAJOR = 9, PROCESSORS = 132 }; /* compute capability 9.0 */
enum { TO_DEVICE = 1, TO_HOST = 2, LOG_BYTES = 1 << 20 };

typedef struct Work {
    struct Work *next;
    char *target;
    const char *source;
    size_t size;
    char *staged; /* what pageable memory held when the copy was asked for */
    void (*function)(void *);
    void *data;
} Work;

typedef struct Stream {
    struct Stream *next;
    Work *first, **last;
    int capturing, mode, is_broken;
    pthread_t owner;
    pthread_mutex_t lock; /* of the work: whoever waits for the device does it, too */
} Stream;

typedef struct {
    Work *first;
} Graph;

/* driver.c's. */
extern __thread int emulated_capture_mode;
int emulated_is_locked(const void *at);
int emulated_lock(void *bytes, size_t size);
int emulated_unlock(void *bytes);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream legacy = {.last = &legacy.first, .lock = PTHREAD_MUTEX_INITIALIZER}, *streams = &legacy;
static __thread int last_error;
static int failure, holds, breaks; /* what every call gives; what becomes of the next recording */
static size_t limit = SIZE_MAX, log_size;
static char log_text[LOG_BYTES], log_taken[LOG_BYTES];
static sem_t reached, go_on;

static int fail(int code) { return last_error = code; }

static Stream *of(void *stream) { return stream ? stream : &legacy; }

static void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&lock);
    if (log_size < LOG_BYTES / 2) log_size += vsprintf(log_text + log_size, format, arguments), log_text[log_size++] = '\n';
    pthread_mutex_unlock(&lock);
    va_end(arguments);
}

void emulated_say(const char *text) { say("%s", text); }

/* Whether a call is not allowed now. `always`: not even by a thread's own mode, as it waits for all streams of the device. */
int emulated_is_refused(const char *name, int always) {
    int refused = 0;
    if (failure) return fail(failure);
    pthread_mutex_lock(&lock);
    for (Stream *s = streams; s; s = s->next) {
        if (!s->capturing) continue;
        int is_own = pthread_equal(s->owner, pthread_self());
        int is_global = s->mode == GLOBAL && emulated_capture_mode == GLOBAL;
        if (always || is_global || (is_own && s->mode != RELAXED)) refused = s->is_broken = 1;
    }
    pthread_mutex_unlock(&lock);
    say("%s%s", name, refused ? ": refused, as a stream records" : "");
    return refused ? fail(CAPTURE_UNSUPPORTED) : OK;
}

static void perform(const Work *work) {
    if (work->function) work->function(work->data);
    else memcpy(work->target, work->staged ? work->staged : work->source, work->size);
}

static void finish(Stream *s) {
    pthread_mutex_lock(&s->lock);
    for (Work *work; !s->capturing && (work = s->first); free(work->staged), free(work)) {
        if (!(s->first = work->next)) s->last = &s->first;
        perform(work);
    }
    pthread_mutex_unlock(&s->lock);
}

static void append(Stream *s, Work work) {
    Work *kept = malloc(sizeof work);
    pthread_mutex_lock(&s->lock);
    *kept = work, kept->next = NULL, *s->last = kept, s->last = &kept->next;
    pthread_mutex_unlock(&s->lock);
}

/* Devices. */
int cudaGetDevice(int *device) { return *device = 0, fail(failure); }
int cudaSetDevice(int device) { return failure ? fail(failure) : device ? fail(INVALID_DEVICE) : OK; }
int cudaGetDeviceCount(int *count) { return *count = 1, OK; }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }
int cudaDriverGetVersion(int *version) { return *version = 13000, OK; }
int cudaMemGetInfo(size_t *available, size_t *total) { return *available = *total = 1ul << 32, fail(failure); }
int cudaPeekAtLastError(void) { return last_error; }

int cudaGetLastError(void) {
    int code = last_error;
    return last_error = failure, code;
}

const char *cudaGetErrorName(int code) { return code ? "cudaError" : "cudaSuccess"; }

const char *cudaGetErrorString(int code) {
    return code == OUT_OF_MEMORY         ? "out of memory"
           : code == OLD_DRIVER          ? "CUDA driver version is insufficient for CUDA runtime version"
           : code == ILLEGAL_ADDRESS     ? "an illegal memory access was encountered"
           : code == CAPTURE_UNSUPPORTED ? "operation not permitted when stream is capturing"
           : code == CAPTURE_INVALIDATED ? "operation failed due to a previous error during capture"
                                         : "emulated error";
}

int cudaGetDeviceProperties(char *properties, int device) {
    memset(properties, 0, 900); /* of cudaDeviceProp in CUDA 13: */
    *(size_t *)(properties + 288) = 1ul << 32, *(size_t *)(properties + 296) = 49152, *(int *)(properties + 308) = 32;
    *(int *)(properties + 320) = 1024, *(int *)(properties + 360) = MAJOR, *(int *)(properties + 384) = PROCESSORS;
    return device ? fail(INVALID_DEVICE) : OK;
}

int cudaDeviceGetAttribute(int *value, int attribute) {
    return *value = attribute == 75 ? MAJOR : attribute == 76 ? 0 : attribute == 16 ? PROCESSORS : 1, OK;
}

int cudaDeviceSynchronize(void) {
    if (emulated_is_refused("cudaDeviceSynchronize", 1)) return last_error;
    for (Stream *s = streams; s; s = s->next) finish(s);
    return OK;
}

/* Memory. */
static int allocate(void **pointer, size_t size, const char *name) {
    if (emulated_is_refused(name, 0)) return last_error;
    if (size > limit) return fail(OUT_OF_MEMORY);
    *pointer = aligned_alloc(256, (size + 511) / 256 * 256);
    return memset(*pointer, 0, size), OK;
}

int cudaMalloc(void **pointer, size_t size) { return allocate(pointer, size, "cudaMalloc"); }

int cudaFree(void *pointer) {
    if (emulated_is_refused("cudaFree", 0)) return last_error;
    return free(pointer), OK;
}

int cudaHostAlloc(void **pointer, size_t size) {
    int code = allocate(pointer, size, "cudaHostAlloc");
    return code ? code : emulated_lock(*pointer, size);
}

int cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size); }

int cudaFreeHost(void *pointer) {
    if (emulated_is_refused("cudaFreeHost", 0)) return last_error;
    return emulated_unlock(pointer), free(pointer), OK;
}

int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
    Stream *s = of(stream);
    Work work = {.target = target, .source = source, .size = size};
    const void *host = kind == TO_DEVICE ? source : kind == TO_HOST ? target : NULL;
    int is_pageable = host && !emulated_is_locked(host);
    if (failure) return fail(failure);
    const char *way = host == source ? "to" : "from";
    if (host) say("copy of %zu bytes %s the device, %s", size, way, is_pageable ? "pageable" : "locked");
    if (kind == TO_DEVICE && is_pageable && !s->capturing) work.staged = memcpy(malloc(size + 1), source, size);
    append(s, work);
    if (kind == TO_HOST && is_pageable) finish(s);
    return OK;
}

int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    const char *way = kind == TO_DEVICE ? "to" : "from";
    if (emulated_is_refused("cudaMemcpy", 0)) return last_error;
    int is_locked = emulated_is_locked(kind == TO_DEVICE ? source : target);
    say("copy of %zu bytes %s the device, %s", size, way, is_locked ? "locked" : "pageable");
    return memcpy(target, source, size), OK;
}

int cudaMemsetAsync(void *target, int value, size_t size, void *stream) {
    if (!of(stream)->capturing) finish(of(stream)), memset(target, value, size);
    return OK;
}

/* Streams. */
int cudaStreamCreateWithFlags(void **stream) {
    Stream *s = *stream = calloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_lock(&lock);
    s->last = &s->first, s->next = streams, streams = s;
    pthread_mutex_unlock(&lock);
    return OK;
}

int cudaStreamCreate(void **stream) { return cudaStreamCreateWithFlags(stream); }

int cudaStreamDestroy(void *stream) {
    pthread_mutex_lock(&lock);
    for (Stream **s = &streams; *s; s = &(*s)->next)
        if (*s == stream) {
            *s = (*s)->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    return OK;
}

int cudaStreamSynchronize(void *stream) {
    Stream *s = of(stream);
    if (failure) return fail(failure);
    if (s->capturing) return s->is_broken = 1, say("a wait for a stream that records"), fail(CAPTURE_UNSUPPORTED);
    return finish(s), OK;
}

int cudaStreamIsCapturing(void *stream, int *status) { return *status = of(stream)->capturing, OK; }

int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    return append(of(stream), (Work){.function = function, .data = data}), OK;
}

int cudaStreamBeginCapture(void *stream, int mode) {
    Stream *s = of(stream);
    finish(s);
    s->mode = mode, s->is_broken = breaks, breaks = 0, s->owner = pthread_self(), s->capturing = 1;
    return say("capture begins"), OK;
}

int cudaStreamEndCapture(void *stream, Graph **graph) {
    Stream *s = of(stream);
    if (holds) holds = 0, sem_post(&reached), sem_wait(&go_on);
    s->capturing = 0;
    say("capture ends%s", s->is_broken ? ", broken" : "");
    *graph = s->is_broken ? NULL : malloc(sizeof **graph);
    if (*graph) (*graph)->first = s->first;
    s->first = NULL, s->last = &s->first;
    return *graph ? OK : fail(CAPTURE_INVALIDATED);
}

int cudaGraphInstantiate(Graph **executable, Graph *graph) {
    *executable = malloc(sizeof *graph);
    return **executable = *graph, OK;
}

int cudaGraphDestroy(Graph *graph) { return free(graph), OK; }

int cudaGraphExecDestroy(Graph *executable) {
    if (emulated_is_refused("cudaGraphExecDestroy", 0)) return last_error;
    return free(executable), OK;
}

int cudaGraphLaunch(Graph *executable, void *stream) {
    if (failure) return fail(failure);
    finish(of(stream)), say("replay");
    for (Work *work = executable->first; work; work = work->next) append(of(stream), *work);
    return OK;
}

/* Kernels. */
static int launch(void) { return fail(failure); }
int cudaLaunchKernel(void) { return launch(); }
int __cudaLaunchKernel(void) { return launch(); }
int cudaLaunchKernelExC(void) { return launch(); }
int cudaFuncGetAttributes(void *attributes) { return memset(attributes, 0, 64), OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { return *blocks = 1, OK; }

void **__cudaRegisterFatBinary(void) {
    static void *one;
    return &one;
}

/* Not CUDA's: what a test does to the device, and sees of it. */
void emulated_fail(int code) { failure = code; }
void emulated_limit(size_t bytes) { limit = bytes; } /* of one allocation */

const char *emulated_log(void) { /* since it was asked for last */
    pthread_mutex_lock(&lock);
    memcpy(log_taken, log_text, log_size), log_taken[log_size] = 0, log_size = 0;
    pthread_mutex_unlock(&lock);
    return log_taken;
}

void emulated_break(void) { breaks = 1; } /* the next recording, as an operator does that waits for the device */
void emulated_hold(void) { holds = 1; } /* the next recording, until it is let go on */
void emulated_wait_until_held(void) { sem_wait(&reached); }
void emulated_go_on(void) { sem_post(&go_on); }
