/* As much of the CUDA driver as serve/engine/cuda_driver.py calls, over POSIX shared memory: for machines without a device.
 *
 * Signatures and error codes are those of cuda.h. It is stricter than the real driver where that is not defined: every call
 * needs a current context on its thread, and whatever leaves an allocation is refused. See device.c.
 */
#include "emulated.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HANDLE_BYTES = 64, MAX_BLOCKS = 64 };

typedef struct {
    char reserved[HANDLE_BYTES];
} Handle;

typedef struct {
    char name[HANDLE_BYTES]; /* "/halfserve_cuda_PID_DEVICE_NUMBER", by the device's number on this machine */
    char *bytes;
    size_t size;
    int opens, is_own, device;
} Block;

static Block blocks[MAX_BLOCKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_up, made, refuses_locking, refuses_peers;

/* The error of a call that needs a context: none is there, the device is lost, or a stream records. */
static int refused(const char *name) {
    int code = emulated_top() ? emulated_is_refused(name, 0) : INVALID_CONTEXT;
    return code == OLD_DRIVER ? OK : code; /* which is what the runtime says of its driver */
}

/* The same of a call that waits for the device. */
static int waits(const char *name) {
    int code = refused(name), device = emulated_current();
    if (!code) code = emulated_legacy(device);
    if (!code) emulated_finish_device(device), code = emulated_seen(device);
    return code == OLD_DRIVER ? OK : code;
}

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
            b->bytes = bytes, b->size = (size_t)status.st_size, b->opens = 1, b->is_own = is_own, b->device = emulated_current();
            return b;
        }
    return NULL;
}

static void unmap(Block *b) {
    munmap(b->bytes, b->size);
    if (b->is_own) shm_unlink(b->name), emulated_give(b->device, b->size);
    memset(b, 0, sizeof *b);
}

/* Devices. */
int cuInit(unsigned flags) { return flags ? INVALID_VALUE : emulated_count() ? (is_up = 1, OK) : NO_DEVICE; }

int cuDeviceGetCount(int *count) { return is_up ? (*count = emulated_count(), OK) : NOT_INITIALIZED; }

int cuDriverGetVersion(int *version) { return *version = 13000, OK; }

int cuDeviceGetName(char *name, int room, int device) { return snprintf(name, room, "emulated device %d", device), OK; }

int cuDeviceComputeCapability(int *major, int *minor, int device) { return (void)device, *major = 9, *minor = 0, OK; }

int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = 1ul << 32, OK; }

int cuDeviceGet(int *device, int ordinal) { return emulated_context(ordinal) ? (*device = ordinal, OK) : INVALID_DEVICE; }

int cuDevicePrimaryCtxRetain(void **context, int device) {
    return (*context = emulated_context(device)) ? OK : INVALID_DEVICE;
}

int cuCtxSetCurrent(void *context) {
    int device = emulated_device_of(context);
    return device < 0 ? INVALID_CONTEXT : (emulated_set_current(device), OK);
}

int cuCtxPushCurrent_v2(void *context) { return emulated_push(context); }

int cuCtxPopCurrent_v2(void **context) { return (*context = emulated_pop()) ? OK : INVALID_CONTEXT; }

/* Memory that processes share. */
int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    char name[HANDLE_BYTES];
    int code = refused("cuMemAlloc"), device = emulated_current();
    if (code || (code = emulated_take(device, size))) return code;
    pthread_mutex_lock(&lock);
    snprintf(name, sizeof name, "/halfserve_cuda_%d_%d_%d", getpid(), emulated_physical(device), made++);
    Block *b = map(name, O_RDWR | O_CREAT | O_EXCL, size, 1);
    pthread_mutex_unlock(&lock);
    return b ? (*pointer = (uint64_t)b->bytes, OK) : INVALID_VALUE;
}

int cuMemFree_v2(uint64_t pointer) {
    int code = waits("cuMemFree");
    if (code) return code;
    pthread_mutex_lock(&lock);
    Block *b = block_at(pointer, 1);
    int is_freed = b && b->is_own;
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
    int owner, device, number, code = refused("cuIpcOpenMemHandle");
    Block *found = NULL;
    if (code) return code;
    memcpy(name, handle.reserved, HANDLE_BYTES);
    if (flags != 1 || sscanf(name, "/halfserve_cuda_%d_%d_%d", &owner, &device, &number) != 3) return INVALID_VALUE;
    if (owner == getpid()) return INVALID_CONTEXT;
    if (refuses_peers && device != emulated_physical(emulated_current())) return PEER_ACCESS_UNSUPPORTED;
    pthread_mutex_lock(&lock);
    for (Block *b = blocks; b < blocks + MAX_BLOCKS; b++)
        if (b->bytes && !strcmp(b->name, name)) b->opens++, found = b; /* the driver counts too */
    if (!found) found = map(name, O_RDWR, 0, 0);
    pthread_mutex_unlock(&lock);
    return found ? (*pointer = (uint64_t)found->bytes, OK) : INVALID_VALUE;
}

int cuIpcCloseMemHandle(uint64_t pointer) {
    int code = refused("cuIpcCloseMemHandle");
    if (code) return code;
    pthread_mutex_lock(&lock);
    Block *b = block_at(pointer, 1);
    int is_open = b && !b->is_own;
    if (is_open && !--b->opens) unmap(b);
    pthread_mutex_unlock(&lock);
    return is_open ? OK : INVALID_VALUE;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t pointer) {
    Block *b = block_at(pointer, 1);
    if (!emulated_top()) return INVALID_CONTEXT;
    return b ? (*base = (uint64_t)b->bytes, *size = b->size, OK) : INVALID_VALUE;
}

static int copy(uint64_t at, void *target, const void *source, size_t size, int direction, const char *name) {
    int code = waits(name);
    if (code) return code;
    emulated_copy_takes(emulated_stream(NULL), direction, size, 1);
    return block_at(at, size) || emulated_holds((char *)at, size) ? (memcpy(target, source, size), OK) : INVALID_VALUE;
}

int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) {
    return copy(source, target, (void *)source, size, TO_HOST, "cuMemcpyDtoH");
}

int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) {
    return copy(target, (void *)target, source, size, TO_DEVICE, "cuMemcpyHtoD");
}

int cuMemcpyDtoD_v2(uint64_t target, uint64_t source, size_t size) {
    int code = waits("cuMemcpyDtoD");
    if (code || !block_at(source, size)) return code ? code : INVALID_VALUE;
    emulated_say_on(emulated_current(), "copy of %zu bytes on the device", size);
    return memcpy((void *)target, (void *)source, size), OK;
}

int cuStreamSynchronize(void *stream) { return stream ? INVALID_CONTEXT : waits("cuStreamSynchronize"); }

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = emulated_capture_mode;
    return emulated_top() ? (emulated_capture_mode = *mode, *mode = before, OK) : INVALID_CONTEXT;
}

/* Memory that cannot be paged out. */
int cuMemHostRegister_v2(void *bytes, size_t size, unsigned flags) {
    int code = refused("cuMemHostRegister");
    if (code || flags || !size) return code ? code : INVALID_VALUE;
    if (refuses_locking) return OUT_OF_MEMORY;
    if (emulated_is_locked(bytes) || emulated_is_locked((char *)bytes + size - 1)) return ALREADY_REGISTERED;
    return emulated_lock(bytes, size);
}

int cuMemHostUnregister(void *bytes) {
    int code = refused("cuMemHostUnregister");
    return code ? code : emulated_unlock(bytes);
}

int cuGetErrorString(int error, const char **text) { return *text = emulated_text(error), OK; }

/* Not the driver's: how many blocks of other processes are open in this one; what is refused from now on. */
int emulated_opened(void) {
    int count = 0;
    for (Block *b = blocks; b < blocks + MAX_BLOCKS; b++) count += b->bytes && !b->is_own;
    return count;
}

void emulated_refuse_locking(int refuses) { refuses_locking = refuses; }
void emulated_refuse_peers(int refuses) { refuses_peers = refuses; }

/* How threads wait for a device: 0 as the driver chooses, 4 asleep. */
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    return !emulated_context(device) || (flags && flags != 4) ? INVALID_VALUE : OK;
}
