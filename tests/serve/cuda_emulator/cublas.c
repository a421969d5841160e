/* cuBLAS and cuBLASLt over the emulated devices: nothing is computed, and what fails is what a test asks for.
 *
 * What is not defined here, the test's library generates; functions that compute call `emulated_compute` then. The numbers and
 * texts are those of cublas_api.h and cublasGetStatusString.
 */
#include "emulated.h"

#include <stdlib.h>

enum { ALLOCATION_FAILED = 3, EXECUTION_FAILED = 13, INTERNAL_ERROR = 14 };

typedef struct {
    int device;
    void *stream;
} Handle;

int cublasCreate_v2(Handle **handle) {
    *handle = calloc(1, sizeof **handle);
    return (*handle)->device = emulated_current(), OK;
}

int cublasLtCreate(Handle **handle) { return cublasCreate_v2(handle); }
int cublasDestroy_v2(Handle *handle) { return free(handle), OK; }
int cublasLtDestroy(Handle *handle) { return free(handle), OK; }
int cublasSetStream_v2(Handle *handle, void *stream) { return handle->stream = stream, OK; }

const char *cublasGetStatusString(int status) {
    return status == OK                  ? "success"
           : status == ALLOCATION_FAILED ? "the resource allocation failed"
           : status == EXECUTION_FAILED  ? "the function failed to launch on the GPU"
           : status == INTERNAL_ERROR    ? "an internal operation failed"
                                         : "emulated error";
}

int emulated_compute(Handle *handle) {
    int status = emulated_blas_status();
    if (status) return status;
    if (handle->device != emulated_current()) return emulated_say("cuBLAS: a handle of another device"), INTERNAL_ERROR;
    if (emulated_seen(handle->device)) return EXECUTION_FAILED;
    return emulated_work(emulated_stream(handle->stream)) ? EXECUTION_FAILED : OK;
}
