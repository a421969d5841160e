/* As much of the CUDA driver as serve/engine/cuda_driver.py calls, over POSIX shared memory: for machines without a device.
 *
 *     cc -shared -fPIC -O1 -o libcuda_emulated.so driver.c
 *
 * Signatures and error codes are those of cuda.h. It is stricter than the real driver where that is not defined: every call
 * needs a current context on its thread, and whatever leaves an allocation is refused. One device.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { HANDLE_BYTES = 64, MAX_BLOCKS = 64, MAX_DEPTH = 8, MAX_RANGES = 256 };

typedef struct {
    char reserved[HANDLE_BYTES];
} Handle;

typedef struct {
    char name[HANDLE_BYTES]; /* "/halfserve_cuda_PID_NUMBER" */
    char *bytes;
    size_t size;
    int opens, is_own;
} Block;

typedef struct {
    char *bytes;
    size_t size;
} Range;

/* runtime.c's, where that is there: the error that a call gets while a stream records. */
__attribute__((weak)) int emulated_is_refused(const char *name, int always);

__thread int emulated_capture_mode;
static Range locked[MAX_RANGES]; /* memory of the host that cannot be paged out */
static int refuses_locking;
static Block blocks[MAX_BLOCKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_up, made;
static char the_context;
static __thread void *stack[MAX_DEPTH];
static __thread int depth;

static int refused(const char *name) { return emulated_is_refused ? emulated_is_refused(name, 0) : OK; }

static int has_context(void) { return depth > 0 && stack[depth - 1] == &the_context; }

static Block *block_at(uint64_t pointer, size_t size) {
    for (Block *b = blocks; b < blocks + MAX_BLOCKS; b++)
        if (b->bytes && (uint64_t)b->bytes <= pointer && pointer + size <= (uint64_t)b->bytes + b->size) return b;
    return NULL;
}

static Block *map(const char *name, int flags, size_t size, int is_own) {
    int file = shm_open(name, flags, 0600);
    struct stat status;
    if (file < 0) return NULL;
    if (size && ftruncate(file, (off_t)size)) return close(file), NULL;
    if (fstat(file, &status)) return close(file), NULL;
    char *bytes = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    for (Block *b = blocks; bytes != MAP_FAILED && b < blocks + MAX_BLOCKS; b++)
        if (!b->bytes) {
            snprintf(b->name, sizeof b->name, "%s", name);
            b->bytes = bytes, b->size = (size_t)status.st_size, b->opens = 1, b->is_own = is_own;
            return b;
        }
    return NULL;
}

static void unmap(Block *b) {
    munmap(b->bytes, b->size);
    if (b->is_own) shm_unlink(b->name);
    memset(b, 0, sizeof *b);
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : (is_up = 1, OK); }

int cuDeviceGetCount(int *count) { return is_up ? (*count = 1, OK) : NOT_INITIALIZED; }

int cuDriverGetVersion(int *version) { return *version = 13000, OK; }

int cuDeviceGetName(char *name, int room, int device) { return snprintf(name, room, "emulated device %d", device), OK; }

int cuDeviceComputeCapability(int *major, int *minor, int device) { return (void)device, *major = 9, *minor = 0, OK; }

int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = 1ul << 32, OK; }

int cuDeviceGet(int *device, int ordinal) { return ordinal ? INVALID_DEVICE : (*device = 0, OK); }

int cuDevicePrimaryCtxRetain(void **context, int device) { return device ? INVALID_DEVICE : (*context = &the_context, OK); }

int cuCtxPushCurrent_v2(void *context) {
    if (context != &the_context || depth == MAX_DEPTH) return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}

int cuCtxPopCurrent_v2(void **context) { return depth ? (*context = stack[--depth], OK) : INVALID_CONTEXT; }

int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    char name[HANDLE_BYTES];
    if (!has_context()) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    snprintf(name, sizeof name, "/halfserve_cuda_%d_%d", getpid(), made++);
    Block *b = map(name, O_RDWR | O_CREAT | O_EXCL, size, 1);
    pthread_mutex_unlock(&lock);
    return b ? (*pointer = (uint64_t)b->bytes, OK) : INVALID_VALUE;
}

int cuMemFree_v2(uint64_t pointer) {
    pthread_mutex_lock(&lock);
    Block *b = block_at(pointer, 1);
    int is_freed = has_context() && b && b->is_own;
    if (is_freed) unmap(b);
    pthread_mutex_unlock(&lock);
    return is_freed ? OK : INVALID_VALUE;
}

int cuIpcGetMemHandle(Handle *handle, uint64_t pointer) {
    Block *b = block_at(pointer, 1);
    if (!b || !b->is_own) return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, b->name, strlen(b->name));
    return OK;
}

int cuIpcOpenMemHandle_v2(uint64_t *pointer, Handle handle, unsigned flags) {
    char name[HANDLE_BYTES + 1] = {0};
    Block *found = NULL;
    if (!has_context()) return INVALID_CONTEXT;
    memcpy(name, handle.reserved, HANDLE_BYTES);
    if (flags != 1 || strncmp(name, "/halfserve_cuda_", 16)) return INVALID_VALUE;
    if (atoi(name + 16) == getpid()) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    for (Block *b = blocks; b < blocks + MAX_BLOCKS; b++)
        if (b->bytes && !strcmp(b->name, name)) b->opens++, found = b; /* the driver counts too */
    if (!found) found = map(name, O_RDWR, 0, 0);
    pthread_mutex_unlock(&lock);
    return found ? (*pointer = (uint64_t)found->bytes, OK) : INVALID_VALUE;
}

int cuIpcCloseMemHandle(uint64_t pointer) {
    pthread_mutex_lock(&lock);
    Block *b = block_at(pointer, 1);
    int is_open = has_context() && b && !b->is_own;
    if (is_open && !--b->opens) unmap(b);
    pthread_mutex_unlock(&lock);
    return is_open ? OK : INVALID_VALUE;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t pointer) {
    Block *b = block_at(pointer, 1);
    if (!has_context()) return INVALID_CONTEXT;
    return b ? (*base = (uint64_t)b->bytes, *size = b->size, OK) : INVALID_VALUE;
}

int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) {
    if (!has_context()) return INVALID_CONTEXT;
    if (refused("cuMemcpyDtoH")) return refused("cuMemcpyDtoH");
    return block_at(source, size) ? (memcpy(target, (void *)source, size), OK) : INVALID_VALUE;
}

int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) {
    if (!has_context()) return INVALID_CONTEXT;
    if (refused("cuMemcpyHtoD")) return refused("cuMemcpyHtoD");
    return block_at(target, size) ? (memcpy((void *)target, source, size), OK) : INVALID_VALUE;
}

int cuStreamSynchronize(void *stream) { return has_context() && !stream ? refused("cuStreamSynchronize") : INVALID_CONTEXT; }

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = emulated_capture_mode;
    return has_context() ? (emulated_capture_mode = *mode, *mode = before, OK) : INVALID_CONTEXT;
}

int emulated_is_locked(const void *at) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (Range *r = locked; r < locked + MAX_RANGES; r++) found |= r->bytes <= (char *)at && (char *)at < r->bytes + r->size;
    pthread_mutex_unlock(&lock);
    return found;
}

int emulated_lock(void *bytes, size_t size) {
    int code = ALREADY_REGISTERED;
    pthread_mutex_lock(&lock);
    for (Range *r = locked; r < locked + MAX_RANGES && code; r++)
        if (!r->bytes) *r = (Range){bytes, size}, code = OK;
    pthread_mutex_unlock(&lock);
    return code;
}

int emulated_unlock(void *bytes) {
    int code = NOT_REGISTERED;
    pthread_mutex_lock(&lock);
    for (Range *r = locked; r < locked + MAX_RANGES; r++)
        if (r->bytes == bytes) *r = (Range){0}, code = OK;
    pthread_mutex_unlock(&lock);
    return code;
}

int cuMemHostRegister_v2(void *bytes, size_t size, unsigned flags) {
    int code = refused("cuMemHostRegister");
    if (!has_context()) return INVALID_CONTEXT;
    if (code || flags || !size) return code ? code : INVALID_VALUE;
    if (refuses_locking) return OUT_OF_MEMORY;
    if (emulated_is_locked(bytes) || emulated_is_locked((char *)bytes + size - 1)) return ALREADY_REGISTERED;
    return emulated_lock(bytes, size);
}

int cuMemHostUnregister(void *bytes) {
    int code = refused("cuMemHostUnregister");
    if (!has_context()) return INVALID_CONTEXT;
    return code ? code : emulated_unlock(bytes);
}

int cuGetErrorString(int error, const char **text) {
    *text = error == INVALID_VALUE     ? "invalid argument"
            : error == OUT_OF_MEMORY   ? "out of memory"
            : error == INVALID_CONTEXT ? "invalid device context"
                                       : "emulated error";
    return OK;
}

/* Not the driver's: how many blocks of other processes are open in this one. */
int emulated_opened(void) {
    int count = 0;
    for (Block *b = blocks; b < blocks + MAX_BLOCKS; b++) count += b->bytes && !b->is_own;
    return count;
}

/* Nor are these: how much of this process's memory is locked, and whether more may be. */
size_t emulated_locked_bytes(void) {
    size_t sum = 0;
    for (Range *r = locked; r < locked + MAX_RANGES; r++) sum += r->size;
    return sum;
}

void emulated_refuse_locking(int refuses) { refuses_locking = refuses; }

/* How threads wait for a device: 0 as the driver chooses, 4 asleep. */
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return device || (flags && flags != 4) ? INVALID_VALUE : OK; }
