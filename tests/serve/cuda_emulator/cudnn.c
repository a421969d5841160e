/* As much of cuDNN as ONNX Runtime's CUDA provider calls, over the emulated devices: nothing is computed, and what is built is logged.
 *
 * cuDNN's backend API, on which its frontend library stands, describes a computation by descriptors that are finalized. Three of
 * them cost time on a device, and are in the log: an operation graph, a heuristics query (an engine heuristics descriptor) and an
 * execution plan. The numbers are those of cudnn_graph.h. What is not defined here, the test's library generates.
 */
#include "emulated.h"

#include <stdlib.h>

enum { NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000 };
enum { ENGINE_HEURISTICS = 4, EXECUTION_PLAN = 5, OPERATION_GRAPH = 15 };
enum { INT64 = 3, NUMERICAL_NOTE = 10, BEHAVIOUR_NOTE = 11, INT32 = 23, KNOB_TYPE = 19, KERNEL_NOTE = 24 };
enum { ENGINE_RESULTS_COUNT = 302, OBJECT_BYTES = 256, WORKSPACE_BYTES = 256 };

typedef struct {
    int type;
} Descriptor;

typedef struct {
    int device;
    void *stream;
} Handle;

typedef struct { /* cudnnConvolutionFwdAlgoPerf_t */
    int algorithm, status;
    float milliseconds;
    size_t workspace;
    int is_deterministic, math_type, reserved[3];
} Performance;

size_t cudnnGetVersion(void) { return 91000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int code) { return code ? "emulated error" : "success"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) text[0] = 0; }

int cudnnCreate(Handle **handle) {
    *handle = calloc(1, sizeof **handle);
    return (*handle)->device = emulated_current(), OK;
}


int cudnnDestroy(Handle *handle) { return free(handle), OK; }
int cudnnSetStream(Handle *handle, void *stream) { return handle->stream = stream, OK; }
int cudnnGetStream(Handle *handle, void **stream) { return *stream = handle->stream, OK; }

/* The backend API. */
int cudnnBackendCreateDescriptor(int type, Descriptor **made) {
    *made = calloc(1, OBJECT_BYTES);
    return (*made)->type = type, OK;
}

int cudnnBackendInitialize(void *made) { return made ? OK : NOT_SUPPORTED; }
int cudnnBackendDestroyDescriptor(Descriptor *made) { return free(made), OK; }
int cudnnBackendSetAttribute(Descriptor *made) { return made ? OK : NOT_SUPPORTED; }

int cudnnBackendFinalize(Descriptor *made) {
    if (made->type == OPERATION_GRAPH) emulated_say("cuDNN operation graph");
    if (made->type == ENGINE_HEURISTICS) emulated_say("cuDNN heuristics query");
    if (made->type == EXECUTION_PLAN) emulated_say("cuDNN execution plan");
    return OK;
}

/* One engine without knobs, notes and workspace. */
int cudnnBackendGetAttribute(Descriptor *made, int name, int type, int64_t room, int64_t *count, void *values) {
    int is_none = type == NUMERICAL_NOTE || type == BEHAVIOUR_NOTE || type == KERNEL_NOTE || type == KNOB_TYPE;
    if (count) *count = is_none || name == ENGINE_RESULTS_COUNT ? 0 : 1;
    if (values && type == INT64) *(int64_t *)values = 0;
    if (values && type == INT32) *(int32_t *)values = 0;
    return made && room >= 0 ? OK : NOT_SUPPORTED;
}

int cudnnBackendExecute(Handle *handle, void *plan, void *variants) {
    if (!handle || !plan || !variants || handle->device != emulated_current()) return NOT_SUPPORTED;
    if (emulated_seen(handle->device) || emulated_work(emulated_stream(handle->stream))) return EXECUTION_FAILED;
    return emulated_say("cuDNN execution"), OK;
}

/* Sizes. What has room for one number has room for all that is written here. */
int cudnnDropoutGetStatesSize(void *handle, size_t *size) { return *size = WORKSPACE_BYTES, OK; }
int cudnnGetReductionWorkspaceSize(void *h, void *d, void *a, void *c, size_t *size) { return *size = WORKSPACE_BYTES, OK; }
int cudnnGetReductionIndicesSize(void *h, void *d, void *a, void *c, size_t *size) { return *size = WORKSPACE_BYTES, OK; }
int cudnnGetRNNWeightSpaceSize(void *handle, void *rnn, size_t *size) { return *size = WORKSPACE_BYTES, OK; }

int cudnnGetRNNTempSpaceSizes(void *handle, void *rnn, int mode, void *x, size_t *workspace, size_t *reserved) {
    return *workspace = *reserved = WORKSPACE_BYTES, OK;
}

int cudnnGetConvolutionForwardWorkspaceSize(void *h, void *x, void *w, void *conv, void *y, int algorithm, size_t *size) {
    return *size = WORKSPACE_BYTES, OK;
}

/* A matrix and a bias of one number each, at the beginning of the weights. */
int cudnnGetRNNWeightParams(void *h, void *rnn, int layer, size_t size, char *space, int linear, void *md, char **m, void *bd, char **b) {
    return *m = *b = space, OK;
}

int cudnnGetTensorNdDescriptor(void *tensor, int requested, int *type, int *rank, int *sizes, int *strides) {
    for (int i = 0; i < requested; i++) sizes[i] = strides[i] = 1;
    return *type = 0, *rank = requested, OK;
}

int cudnnGetConvolutionForwardAlgorithm_v7(void *h, void *x, void *w, void *conv, void *y, int wanted, int *count, Performance *found) {
    return *count = 1, *found = (Performance){.workspace = WORKSPACE_BYTES}, OK;
}

int cudnnFindConvolutionForwardAlgorithmEx(
    void *h, void *x, void *xd, void *w, void *wd, void *conv, void *y, void *yd, int wanted, int *count, Performance *found
) {
    return *count = 1, *found = (Performance){.workspace = WORKSPACE_BYTES}, OK;
}
