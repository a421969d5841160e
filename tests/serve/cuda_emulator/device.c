/* The emulated devices: memory, faults, the time that copies take, and the streams that record.
 *
 * A process has EMULATED_CUDA_DEVICES devices (1 unless it says more), of which CUDA_VISIBLE_DEVICES hides some. Each thread has a
 * stack of contexts, as in CUDA: cudaSetDevice replaces the topmost one. Memory, streams, events and faults belong to a device.
 *
 * Copies from and to locked memory happen when their stream is waited for, at the last possible moment. With a rate
 * (emulated_copy_rate) they take time: each device has one copy engine a direction, and a copy from pageable memory blocks its
 * caller. Calls that a thread must not make while another one records are refused, and break the recording: see
 * cudaThreadExchangeStreamCaptureMode, and "Prohibited and Unhandled Operations" in the CUDA programming guide.
 */
#include "emulated.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LOG_BYTES = 1 << 20, MAX_DEPTH = 8, MAX_RANGES = 256 };
static const int64_t SECOND_NS = 1000000000;

typedef struct {
    size_t total, used;
    int failure;             /* what every call gets */
    int armed, pending;      /* a fault of the next work; a fault that no call has seen yet */
    int64_t free_ns[DIRECTIONS]; /* when the copy engine of a direction is free */
    Stream legacy;
} Device;

typedef struct {
    char *bytes;
    size_t size;
} Range;

__thread int emulated_capture_mode;
static Device devices[MAX_DEVICES];
static int physical[MAX_DEVICES], count;
static char contexts[MAX_DEVICES]; /* their addresses are the contexts */
static __thread int stack[MAX_DEPTH], depth, last_error;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, memory_lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams;
static Range locked[MAX_RANGES]; /* memory of the host that cannot be paged out */
static double bytes_per_ns;      /* of copies; 0 for copies that take no time */
static int64_t copied_ns[2];     /* time of copies: that went on beside their callers, that blocked them */
static int blas_status, blas_times;
static size_t log_size;
static char log_text[LOG_BYTES], log_taken[LOG_BYTES];

/* Devices. */
static void find_devices(void) {
    const char *made = getenv("EMULATED_CUDA_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    int all = made ? atoi(made) : 1;
    char *end;
    if (!visible)
        for (; count < all && count < MAX_DEVICES; count++) physical[count] = count;
    while (visible && count < MAX_DEVICES) { /* what follows a number that is not there is hidden, too */
        long number = strtol(visible, &end, 10);
        if (end == visible || number < 0 || number >= all) break;
        physical[count++] = (int)number;
        if (*end != ',') break;
        visible = end + 1;
    }
    for (Device *d = devices; d < devices + count; d++) {
        d->total = 1ul << 32;
        d->legacy = (Stream){.next = streams, .device = (int)(d - devices), .is_blocking = 1, .lock = PTHREAD_MUTEX_INITIALIZER};
        d->legacy.last = &d->legacy.first, streams = &d->legacy;
    }
}

int emulated_count(void) { return pthread_once(&once, find_devices), count; }
int emulated_physical(int device) { return device < emulated_count() ? physical[device] : -1; }
int emulated_current(void) { return emulated_count() && depth ? stack[depth - 1] : 0; }
void *emulated_context(int device) { return 0 <= device && device < emulated_count() ? contexts + device : NULL; }
void *emulated_top(void) { return depth ? contexts + stack[depth - 1] : NULL; }
void *emulated_pop(void) { return depth ? contexts + stack[--depth] : NULL; }
void emulated_set_current(int device) { depth += !depth, stack[depth - 1] = device; }

int emulated_device_of(void *context) {
    char *at = context;
    return contexts <= at && at < contexts + emulated_count() ? (int)(at - contexts) : -1;
}

int emulated_push(void *context) {
    int device = emulated_device_of(context);
    return device < 0 || depth == MAX_DEPTH ? INVALID_CONTEXT : (stack[depth++] = device, OK);
}

/* Memory. */
int emulated_take(int device, size_t size) {
    pthread_mutex_lock(&memory_lock);
    int fits = size <= devices[device].total && devices[device].used <= devices[device].total - size;
    if (fits) devices[device].used += size;
    pthread_mutex_unlock(&memory_lock);
    return fits ? OK : OUT_OF_MEMORY;
}

void emulated_give(int device, size_t size) {
    pthread_mutex_lock(&memory_lock);
    devices[device].used -= size;
    pthread_mutex_unlock(&memory_lock);
}

size_t emulated_total(int device) { return devices[device].total; }
size_t emulated_used(int device) { return devices[device].used; }
void emulated_memory(int device, size_t total) { devices[device].total = total; }

int emulated_is_locked(const void *at) {
    int found = 0;
    pthread_mutex_lock(&memory_lock);
    for (Range *r = locked; r < locked + MAX_RANGES; r++) found |= r->bytes <= (char *)at && (char *)at < r->bytes + r->size;
    pthread_mutex_unlock(&memory_lock);
    return found;
}

int emulated_lock(void *bytes, size_t size) {
    int code = ALREADY_REGISTERED;
    pthread_mutex_lock(&memory_lock);
    for (Range *r = locked; r < locked + MAX_RANGES && code; r++)
        if (!r->bytes) *r = (Range){bytes, size}, code = OK;
    pthread_mutex_unlock(&memory_lock);
    return code;
}

int emulated_unlock(void *bytes) {
    int code = NOT_REGISTERED;
    pthread_mutex_lock(&memory_lock);
    for (Range *r = locked; r < locked + MAX_RANGES; r++)
        if (r->bytes == bytes) *r = (Range){0}, code = OK;
    pthread_mutex_unlock(&memory_lock);
    return code;
}

size_t emulated_locked_bytes(void) {
    size_t sum = 0;
    for (Range *r = locked; r < locked + MAX_RANGES; r++) sum += r->size;
    return sum;
}

/* Errors. */
int emulated_report(int code) { return last_error = code; }
int emulated_failure(int device) { return emulated_report(devices[device].failure); }

int emulated_last_error(int taken) {
    int code = last_error;
    return taken ? (last_error = devices[emulated_current()].failure, code) : code;
}

int emulated_seen(int device) {
    Device *d = devices + device;
    pthread_mutex_lock(&lock);
    if (d->pending && !d->failure) d->failure = d->pending;
    pthread_mutex_unlock(&lock);
    return emulated_failure(device);
}

int emulated_work(Stream *stream) {
    Device *d = devices + stream->device;
    int code = emulated_failure(stream->device);
    pthread_mutex_lock(&lock);
    if (d->armed && !stream->capturing) d->pending = d->armed, d->armed = 0;
    pthread_mutex_unlock(&lock);
    return code;
}

int emulated_blas_status(void) {
    pthread_mutex_lock(&lock);
    int status = blas_times ? (blas_times--, blas_status) : OK;
    pthread_mutex_unlock(&lock);
    return status;
}

/* `always`: not even allowed by a thread's own mode, as it waits for all streams of the device. */
int emulated_is_refused(const char *name, int always) {
    int refused = 0, device = emulated_current(), code = emulated_failure(device);
    if (code) return code;
    pthread_mutex_lock(&lock);
    for (Stream *s = streams; s; s = s->next) {
        if (!s->capturing) continue;
        int is_own = pthread_equal(s->owner, pthread_self());
        int is_global = s->mode == GLOBAL && emulated_capture_mode == GLOBAL;
        if ((always && s->device == device) || is_global || (is_own && s->mode != RELAXED)) refused = s->is_broken = 1;
    }
    pthread_mutex_unlock(&lock);
    emulated_say_on(device, "%s%s", name, refused ? ": refused, as a stream records" : "");
    return refused ? emulated_report(CAPTURE_UNSUPPORTED) : OK;
}

int emulated_legacy(int device) {
    int refused = 0;
    pthread_mutex_lock(&lock);
    for (Stream *s = streams; s; s = s->next)
        if (s->capturing && s->is_blocking && s->device == device) refused = s->is_broken = 1;
    pthread_mutex_unlock(&lock);
    if (refused) emulated_say_on(device, "legacy stream: refused, as a blocking stream records");
    return refused ? emulated_report(CAPTURE_IMPLICIT) : OK;
}

const char *emulated_text(int code) {
    return code == OK                        ? "no error"
           : code == INVALID_VALUE           ? "invalid argument"
           : code == OUT_OF_MEMORY           ? "out of memory"
           : code == OLD_DRIVER              ? "CUDA driver version is insufficient for CUDA runtime version"
           : code == NO_DEVICE               ? "no CUDA-capable device is detected"
           : code == INVALID_DEVICE          ? "invalid device ordinal"
           : code == INVALID_CONTEXT         ? "invalid device context"
           : code == PEER_ACCESS_UNSUPPORTED ? "peer access is not supported between these two devices"
           : code == INVALID_HANDLE          ? "invalid resource handle"
           : code == ILLEGAL_ADDRESS         ? "an illegal memory access was encountered"
           : code == CAPTURE_UNSUPPORTED     ? "operation not permitted when stream is capturing"
           : code == CAPTURE_INVALIDATED     ? "operation failed due to a previous error during capture"
           : code == CAPTURE_IMPLICIT        ? "operation would make the legacy stream depend on a capturing blocking stream"
                                             : "emulated error";
}

/* What a test does to devices. Code 0 makes them well again, as only a new process could. */
void emulated_lose(int device, int code) {
    Device *d = devices + device;
    d->failure = code, d->armed = d->pending = 0;
}

void emulated_fault(int device, int code) { devices[device].armed = code; } /* of the next work; a later call sees it */

void emulated_fail(int code) { /* every device */
    for (int device = 0; device < emulated_count(); device++) emulated_lose(device, code);
}

void emulated_blas(int status, int times) { blas_status = status, blas_times = times; } /* of the next calls of cuBLAS */

/* Streams. */
Stream *emulated_stream(void *stream) {
    int device = emulated_current();
    return stream ? stream : &devices[device].legacy;
}

Stream *emulated_make_stream(int is_blocking) {
    Stream *s = calloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    s->device = emulated_current(), s->is_blocking = is_blocking, s->last = &s->first;
    pthread_mutex_lock(&lock);
    s->next = streams, streams = s;
    pthread_mutex_unlock(&lock);
    return s;
}

void emulated_destroy_stream(Stream *stream) { /* its memory stays, as events may name it */
    pthread_mutex_lock(&lock);
    for (Stream **s = &streams; *s; s = &(*s)->next)
        if (*s == stream) {
            *s = (*s)->next;
            break;
        }
    pthread_mutex_unlock(&lock);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

static void sleep_until(int64_t at_ns) {
    struct timespec until = {.tv_sec = at_ns / SECOND_NS, .tv_nsec = at_ns % SECOND_NS};
    if (at_ns > now_ns()) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

void emulated_copy_takes(Stream *s, int direction, size_t size, int blocks) {
    if (!bytes_per_ns) return;
    int64_t takes_ns = (int64_t)((double)size / bytes_per_ns), *free_ns = devices[s->device].free_ns + direction;
    int64_t begins_ns = now_ns();
    pthread_mutex_lock(&lock);
    if (begins_ns < s->ready_ns) begins_ns = s->ready_ns;
    if (begins_ns < *free_ns) begins_ns = *free_ns;
    int64_t ends_ns = s->ready_ns = *free_ns = begins_ns + takes_ns;
    copied_ns[blocks] += takes_ns;
    pthread_mutex_unlock(&lock);
    if (blocks) sleep_until(ends_ns);
}

void emulated_copy_rate(double bytes_per_second) {
    bytes_per_ns = bytes_per_second / 1e9;
    copied_ns[0] = copied_ns[1] = 0;
}

int64_t emulated_copied_ns(int blocked) { return copied_ns[blocked]; } /* since the rate was set */

static void perform(const Work *work) {
    if (work->function) work->function(work->data);
    else memcpy(work->target, work->staged ? work->staged : work->source, work->size);
}

void emulated_finish(Stream *s) {
    if (!s->capturing) sleep_until(s->ready_ns);
    pthread_mutex_lock(&s->lock);
    for (Work *work; !s->capturing && (work = s->first); free(work->staged), free(work)) {
        if (!(s->first = work->next)) s->last = &s->first;
        perform(work);
    }
    pthread_mutex_unlock(&s->lock);
}

void emulated_finish_device(int device) {
    for (Stream *s = streams; s; s = s->next)
        if (s->device == device) emulated_finish(s);
}

void emulated_append(Stream *s, Work work) {
    Work *kept = malloc(sizeof work);
    pthread_mutex_lock(&s->lock);
    *kept = work, kept->next = NULL, *s->last = kept, s->last = &kept->next;
    pthread_mutex_unlock(&s->lock);
}

/* The log. Lines of other devices than the first begin with "device 1: ". */
void emulated_say_on(int device, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&lock);
    if (log_size < LOG_BYTES / 2) {
        if (device) log_size += sprintf(log_text + log_size, "device %d: ", device);
        log_size += vsprintf(log_text + log_size, format, arguments), log_text[log_size++] = '\n';
    }
    pthread_mutex_unlock(&lock);
    va_end(arguments);
}

void emulated_say(const char *text) { emulated_say_on(emulated_current(), "%s", text); }

const char *emulated_log(void) { /* since it was asked for last */
    pthread_mutex_lock(&lock);
    memcpy(log_taken, log_text, log_size), log_taken[log_size] = 0, log_size = 0;
    pthread_mutex_unlock(&lock);
    return log_taken;
}
