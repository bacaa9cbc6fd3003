/* The pattern of pyucx.Stream in C, busy polling: the ceiling that `python -m pyucx.bench` compares with.
 *
 * A child process puts LAYERS layers of SIZE bytes into the parent's memory: each in slices of 1 MiB with at most 4 MiB in
 * flight, then a flush, and in the flush's completion a message. The parent starts a round with a message and counts
 * the layers' messages. Prints one line per measured round: seconds.
 *
 * usage: ucx_stream SIZE LAYERS ROUNDS          (transports by UCX_TLS, e.g. UCX_TLS=tcp)
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#include <ucp/api/ucp.h>

enum { MESSAGE_LAYER = 1, MESSAGE_GO = 2 };
static const size_t slice_bytes = 1 << 20, window_bytes = 4 << 20;

static ucp_worker_h worker;
static ucp_ep_h peer;
static ucp_request_param_t message_params;
static volatile int layers_seen, rounds_asked;
static size_t in_flight;
static int flushing;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fail(const char *what) { fprintf(stderr, "%s\n", what); _exit(1); }

static void write_all(int fd, const void *data, size_t size) {
    if (write(fd, data, size) != (ssize_t)size) fail("short write");
}

static void read_all(int fd, void *data, size_t size) {
    for (char *at = data; size;) {
        ssize_t got = read(fd, at, size);
        if (got <= 0) fail("short read");
        at += got;
        size -= got;
    }
}

static void free_request(void *request, ucs_status_t status, void *user) {
    if (status != UCS_OK) fail(ucs_status_string(status));
    ucp_request_free(request);
}

static void put_done(void *request, ucs_status_t status, void *user) {
    free_request(request, status, user);
    in_flight -= (size_t)user;
}

static void send_message(unsigned id) {
    static int nothing;
    if (UCS_PTR_IS_ERR(ucp_am_send_nbx(peer, id, &nothing, sizeof nothing, NULL, 0, &message_params))) fail("message");
}

static void flush_done(void *request, ucs_status_t status, void *user) {
    if (request) free_request(request, status, user);
    flushing--;
    send_message(MESSAGE_LAYER);
}

static void peer_failed(void *arg, ucp_ep_h ep, ucs_status_t status) { fail(ucs_status_string(status)); }

static ucs_status_t received(void *arg, const void *header, size_t header_length, void *data, size_t length,
                             const ucp_am_recv_param_t *param) {
    if ((size_t)arg == MESSAGE_LAYER) layers_seen++;
    else rounds_asked++;
    return UCS_OK;
}

static void put_layers(char *source, uint64_t target, ucp_rkey_h key, size_t size, int layers) {
    ucp_request_param_t put = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA};
    put.cb.send = put_done;
    ucp_request_param_t flush = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK};
    flush.cb.send = flush_done;
    for (size_t layer = 0; layer < (size_t)layers; layer++) {
        for (size_t at = layer * size; at < (layer + 1) * size; at += slice_bytes) {
            size_t left = (layer + 1) * size - at, length = left < slice_bytes ? left : slice_bytes;
            while (in_flight >= window_bytes) ucp_worker_progress(worker);
            put.user_data = (void *)length;
            ucs_status_ptr_t request = ucp_put_nbx(peer, source + at, length, target + at, key, &put);
            if (UCS_PTR_IS_ERR(request)) fail("put");
            if (request) in_flight += length;
        }
        flushing++;
        ucs_status_ptr_t request = ucp_ep_flush_nbx(peer, &flush);
        if (UCS_PTR_IS_ERR(request)) fail("flush");
        if (!request) flush_done(NULL, UCS_OK, NULL);
        ucp_worker_progress(worker);
    }
    while (in_flight || flushing) ucp_worker_progress(worker);
}

static void *exchange(int in, int out, const void *data, size_t size) {
    size_t length;
    write_all(out, &size, sizeof size);
    write_all(out, data, size);
    read_all(in, &length, sizeof length);
    void *theirs = malloc(length);
    read_all(in, theirs, length);
    return theirs;
}

int main(int argc, char **argv) {
    if (argc != 4) fail("usage: ucx_stream SIZE LAYERS ROUNDS");
    size_t size = strtoull(argv[1], NULL, 10);
    int layers = atoi(argv[2]), rounds = atoi(argv[3]), up[2], down[2];
    if (pipe(up) || pipe(down)) fail("pipe");
    pid_t child = fork();
    int is_child = child == 0, in = is_child ? down[0] : up[0], out = is_child ? up[1] : down[1];

    ucp_config_t *config;
    ucp_config_read(NULL, NULL, &config);
    ucp_config_modify(config, "RNDV_THRESH", "inf");
    ucp_params_t context_params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                   .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    ucp_context_h context;
    if (ucp_init(&context_params, config, &context)) fail("init");
    ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE};
    if (ucp_worker_create(context, &worker_params, &worker)) fail("worker");
    for (size_t id = MESSAGE_LAYER; id <= MESSAGE_GO; id++) {
        ucp_am_handler_param_t handler = {.field_mask = 15, .id = id, .flags = UCP_AM_FLAG_WHOLE_MSG, .cb = received,
                                          .arg = (void *)id};
        ucp_worker_set_am_recv_handler(worker, &handler);
    }
    message_params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_FLAGS;
    message_params.flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
    message_params.cb.send = free_request;

    size_t total = size * layers;
    char *buffer = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(buffer, is_child + 1, total);
    ucp_mem_map_params_t map = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                                .address = buffer, .length = total};
    ucp_mem_h memory;
    if (ucp_mem_map(context, &map, &memory)) fail("register");
    void *packed;
    size_t packed_length, address_length;
    ucp_rkey_pack(context, memory, &packed, &packed_length);
    ucp_address_t *address;
    ucp_worker_get_address(worker, &address, &address_length);

    ucp_ep_params_t endpoint = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                              UCP_EP_PARAM_FIELD_ERR_HANDLER,
                                .address = exchange(in, out, address, address_length),
                                .err_mode = UCP_ERR_HANDLING_MODE_PEER, .err_handler.cb = peer_failed};
    if (ucp_ep_create(worker, &endpoint, &peer)) fail("endpoint");
    uint64_t target = *(uint64_t *)exchange(in, out, &buffer, sizeof buffer);
    ucp_rkey_h key;
    if (ucp_ep_rkey_unpack(peer, exchange(in, out, packed, packed_length), &key)) fail("key");

    if (is_child) {
        for (int round = 0; round < rounds + 2; round++) {
            while (rounds_asked <= round) ucp_worker_progress(worker);
            put_layers(buffer, target, key, size, layers);
        }
        for (;;) ucp_worker_progress(worker); /* until the parent kills */
    }
    for (int round = 0; round < rounds + 2; round++) {
        int before = layers_seen;
        double start = now();
        send_message(MESSAGE_GO);
        while (layers_seen < before + layers) ucp_worker_progress(worker);
        if (round >= 2) printf("%.9f\n", now() - start);
    }
    fflush(stdout);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    _exit(0);
}
