/* A gRPC server that computes nothing: each method is answered with the bytes of a file of its name.
 *
 *     cc -O2 -o answer_at_once answer_at_once.c -lnghttp2
 *     ./answer_at_once PORT FOLDER
 *
 * What a load generator reaches against it is the most that any server on the same machine could show. One thread, one answer a
 * request, no checks: for measuring only. Two things are put into the answers, as perf_analyzer insists on them: the id of an
 * inference request, and in ModelStatistics how many there were, wherever the file has MARK.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <nghttp2/nghttp2.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_CLIENTS = 1024, MAX_ANSWER = 8192, READ_BYTES = 1 << 18, MAX_ID = 128, WINDOW = 1 << 24 };

static const uint8_t MARK[5] = {0x81, 0x82, 0x83, 0x84, 0x05}; /* a varint of five bytes */
static const char *METHODS[] = {"ModelInfer",
                                "ModelMetadata",
                                "ModelConfig",
                                "ModelStatistics",
                                "ServerMetadata",
                                "ServerLive",
                                "ServerReady",
                                "ModelReady",
                                "SystemSharedMemoryRegister",
                                "SystemSharedMemoryUnregister"};
enum { METHOD_COUNT = sizeof METHODS / sizeof *METHODS };

static struct {
    uint8_t bytes[MAX_ANSWER];
    size_t size;
} answers[METHOD_COUNT];
static uint32_t inferred;

struct call {
    int method;
    uint8_t head[5 + 256]; /* the first bytes of the request: frame, model and id */
    size_t head_size;
    uint8_t answer[MAX_ANSWER + MAX_ID + 2];
    size_t size, sent;
};

struct client {
    int socket;
    nghttp2_session *http2;
};

static void frame(struct call *call) { /* gRPC's length prefix */
    uint32_t size = htonl((uint32_t)call->size - 5);
    memcpy(call->answer + 1, &size, 4);
}

static void put_id(struct call *call) { /* field 3, a string, in request and answer alike */
    for (size_t at = 5; at + 2 <= call->head_size && (call->head[at] & 7) == 2;) {
        size_t size = call->head[at + 1], end = at + 2 + size;
        if (size >= MAX_ID || end > call->head_size) return;
        if (call->head[at] == 0x1a) {
            memcpy(call->answer + call->size, call->head + at, end - at);
            call->size += end - at;
            return;
        }
        at = end;
    }
}

static void put_count(struct call *call) {
    for (size_t at = 0; at + sizeof MARK <= call->size; at++)
        if (!memcmp(call->answer + at, MARK, sizeof MARK))
            for (int i = 0; i < 5; i++) call->answer[at + i] = (inferred >> 7 * i & 0x7f) | (i < 4 ? 0x80 : 0);
}

static ssize_t next_bytes(nghttp2_session *http2, int32_t stream, uint8_t *to, size_t most, uint32_t *flags,
                          nghttp2_data_source *source, void *user) {
    static const nghttp2_nv ok = {(uint8_t *)"grpc-status", (uint8_t *)"0", 11, 1, NGHTTP2_NV_FLAG_NONE};
    struct call *call = source->ptr;
    size_t size = call->size - call->sent < most ? call->size - call->sent : most;
    memcpy(to, call->answer + call->sent, size);
    call->sent += size;
    if (call->sent == call->size) {
        *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
        nghttp2_submit_trailer(http2, stream, &ok, 1);
    }
    return (ssize_t)size;
}

static int on_headers(nghttp2_session *http2, const nghttp2_frame *of, void *user) {
    struct call *call = calloc(1, sizeof *call);
    call->method = -1;
    nghttp2_session_set_stream_user_data(http2, of->hd.stream_id, call);
    return 0;
}

static int on_header(nghttp2_session *http2, const nghttp2_frame *of, const uint8_t *name, size_t name_size, const uint8_t *value,
                     size_t size, uint8_t flags, void *user) {
    struct call *call = nghttp2_session_get_stream_user_data(http2, of->hd.stream_id);
    const char *slash = memrchr(value, '/', size);
    if (!call || name_size != 5 || memcmp(name, ":path", 5) || !slash) return 0;
    for (int i = 0; i < METHOD_COUNT; i++)
        if (!strcmp(METHODS[i], slash + 1)) call->method = i; /* nghttp2 ends values with a 0 */
    return 0;
}

static int on_data(nghttp2_session *http2, uint8_t flags, int32_t stream, const uint8_t *data, size_t size, void *user) {
    struct call *call = nghttp2_session_get_stream_user_data(http2, stream);
    if (!call) return 0;
    size_t room = sizeof call->head - call->head_size;
    memcpy(call->head + call->head_size, data, size < room ? size : room);
    call->head_size += size < room ? size : room;
    return 0;
}

static int on_frame(nghttp2_session *http2, const nghttp2_frame *of, void *user) {
    static const nghttp2_nv headers[] = {
        {(uint8_t *)":status", (uint8_t *)"200", 7, 3, NGHTTP2_NV_FLAG_NONE},
        {(uint8_t *)"content-type", (uint8_t *)"application/grpc", 12, 16, NGHTTP2_NV_FLAG_NONE},
    };
    struct call *call = nghttp2_session_get_stream_user_data(http2, of->hd.stream_id);
    if (!call || !(of->hd.flags & NGHTTP2_FLAG_END_STREAM)) return 0;
    if (call->method < 0) return nghttp2_submit_rst_stream(http2, 0, of->hd.stream_id, NGHTTP2_REFUSED_STREAM);
    call->size = answers[call->method].size;
    memcpy(call->answer, answers[call->method].bytes, call->size);
    if (call->method == 0) {
        inferred++;
        put_id(call);
    }
    put_count(call);
    frame(call);
    nghttp2_data_provider provider = {.source.ptr = call, .read_callback = next_bytes};
    return nghttp2_submit_response(http2, of->hd.stream_id, headers, 2, &provider);
}

static int on_close(nghttp2_session *http2, int32_t stream, uint32_t code, void *user) {
    free(nghttp2_session_get_stream_user_data(http2, stream));
    return 0;
}

static ssize_t to_socket(nghttp2_session *http2, const uint8_t *data, size_t size, int flags, void *user) {
    ssize_t sent = send(((struct client *)user)->socket, data, size, 0);
    return sent < 0 ? NGHTTP2_ERR_CALLBACK_FAILURE : sent;
}

static struct client *accept_client(int listening, nghttp2_session_callbacks *callbacks) {
    static const nghttp2_settings_entry settings[] = {
        {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, 1000},
        {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, WINDOW},
        {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, 1 << 20},
    };
    struct client *client = calloc(1, sizeof *client);
    int on = 1;
    client->socket = accept(listening, NULL, NULL);
    setsockopt(client->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    nghttp2_session_server_new(&client->http2, callbacks, client);
    nghttp2_submit_settings(client->http2, 0, settings, 3);
    nghttp2_session_set_local_window_size(client->http2, 0, 0, WINDOW);
    nghttp2_session_send(client->http2);
    return client;
}

static int serve(struct client *client) { /* 0 once it has gone */
    static uint8_t received[READ_BYTES];
    ssize_t size = recv(client->socket, received, sizeof received, 0);
    return size > 0 && nghttp2_session_mem_recv(client->http2, received, (size_t)size) >= 0 &&
           nghttp2_session_send(client->http2) == 0;
}

int main(int count, char **arguments) {
    if (count != 3) return fprintf(stderr, "usage: answer_at_once PORT FOLDER\n"), 2;
    for (int i = 0; i < METHOD_COUNT; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", arguments[2], METHODS[i]);
        FILE *file = fopen(path, "rb");
        if (!file) return perror(path), 2;
        answers[i].size = fread(answers[i].bytes, 1, MAX_ANSWER, file);
        fclose(file);
    }
    signal(SIGPIPE, SIG_IGN);
    nghttp2_session_callbacks *callbacks;
    nghttp2_session_callbacks_new(&callbacks);
    nghttp2_session_callbacks_set_send_callback(callbacks, to_socket);
    nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, on_headers);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
    nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, on_frame);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close);

    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)atoi(arguments[1])),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct pollfd polled[1 + MAX_CLIENTS] = {{.fd = socket(AF_INET, SOCK_STREAM, 0), .events = POLLIN}};
    struct client *clients[1 + MAX_CLIENTS];
    int on = 1, used = 1;
    setsockopt(polled[0].fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(polled[0].fd, (struct sockaddr *)&address, sizeof address) || listen(polled[0].fd, 64)) return perror("bind"), 2;
    for (;;) {
        poll(polled, (nfds_t)used, -1);
        for (int i = used - 1; i > 0; i--) {
            if (!polled[i].revents || serve(clients[i])) continue;
            close(clients[i]->socket);
            nghttp2_session_del(clients[i]->http2);
            free(clients[i]);
            polled[i] = polled[--used];
            clients[i] = clients[used];
        }
        if (polled[0].revents && used <= MAX_CLIENTS) {
            clients[used] = accept_client(polled[0].fd, callbacks);
            polled[used] = (struct pollfd){.fd = clients[used]->socket, .events = POLLIN};
            used++;
        }
    }
}
