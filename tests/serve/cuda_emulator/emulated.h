/* What the emulated libraries share: the devices, their streams and faults. device.c defines it. */
#ifndef EMULATED_H
#define EMULATED_H
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, OLD_DRIVER = 35 };
enum { NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, PEER_ACCESS_UNSUPPORTED = 217, INVALID_HANDLE = 400, ILLEGAL_ADDRESS = 700 };
enum { ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_IMPLICIT = 906 };
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
enum { TO_DEVICE = 1, TO_HOST = 2, DIRECTIONS = 3, MAX_DEVICES = 8 };

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
    int device, is_blocking, capturing, mode, is_broken;
    int64_t ready_ns; /* when its copies have taken their time */
    pthread_t owner;
    pthread_mutex_t lock; /* of the work: whoever waits for the device does it, too */
} Stream;

/* Devices. */
int emulated_count(void);           /* visible devices */
int emulated_physical(int device);  /* number of a visible device on this machine */
int emulated_current(void);         /* this thread's device */
void *emulated_context(int device); /* NULL for a device that is not there */
int emulated_device_of(void *context);
void *emulated_top(void); /* this thread's current context; NULL where it has none */
int emulated_push(void *context);
void *emulated_pop(void);
void emulated_set_current(int device);

/* Memory. */
int emulated_take(int device, size_t size); /* OUT_OF_MEMORY where the device has less */
void emulated_give(int device, size_t size);
int emulated_holds(const char *at, size_t size); /* whether the runtime has allocated all of it on a device */
size_t emulated_total(int device), emulated_used(int device);
int emulated_is_locked(const void *at);
int emulated_lock(void *bytes, size_t size), emulated_unlock(void *bytes);

/* Errors. Each call begins with one of the first three, and returns the code that these give, where it is not 0. */
int emulated_report(int code);    /* remember an error for cudaGetLastError */
int emulated_failure(int device); /* the error that every call for the device gets */
int emulated_seen(int device);    /* the same for a call that waits for the device, which sees pending faults */
int emulated_work(Stream *stream); /* the same for asynchronous work, which may fault later */
int emulated_blas_status(void);    /* the status that the next call of cuBLAS gets */
int emulated_last_error(int taken);
int emulated_is_refused(const char *name, int always); /* a call that a recording prohibits; see device.c */
int emulated_legacy(int device);                       /* work for the legacy stream, which waits for blocking streams */
const char *emulated_text(int code);

/* Streams. */
extern __thread int emulated_capture_mode;
Stream *emulated_stream(void *stream); /* NULL is the legacy stream of the current device */
Stream *emulated_make_stream(int is_blocking);
void emulated_destroy_stream(Stream *stream);
void emulated_append(Stream *stream, Work work);
void emulated_finish(Stream *stream);
void emulated_finish_device(int device);
void emulated_copy_takes(Stream *stream, int direction, size_t size, int blocks);

void emulated_say(const char *text);
void emulated_say_on(int device, const char *format, ...);
#endif
