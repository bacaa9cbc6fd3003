"""The part of UCX's C API that this package uses, as cffi declarations in ABI mode.

UCX structures carry a field mask and grow at the tail, so the declarations here are at least as long as those of every
release from 1.13 to 1.22; `tests/unit/pyucx/test_layouts.py` compiles the installed headers and compares.
"""

from __future__ import annotations

from typing import Final

CDEF: Final = """
typedef signed char ucs_status_t;              /* a packed enum: one byte */
typedef void *ucs_status_ptr_t;
typedef void *ucp_context_h; typedef void *ucp_worker_h; typedef void *ucp_ep_h;
typedef void *ucp_mem_h; typedef void *ucp_rkey_h; typedef void ucp_config_t;
typedef void ucp_address_t; typedef uint64_t ucp_datatype_t;

typedef struct { unsigned long ucs_bits[16]; } ucs_cpu_set_t;
typedef struct { const void *addr; uint32_t addrlen; } ucs_sock_addr_t;

typedef struct {
    uint64_t field_mask; uint64_t features; size_t request_size;
    void *request_init; void *request_cleanup; uint64_t tag_sender_mask;
    int mt_workers_shared; size_t estimated_num_eps; size_t estimated_num_ppn;
    const char *name; size_t node_local_id;
} ucp_params_t;

typedef struct {
    uint64_t field_mask; int thread_mode; ucs_cpu_set_t cpu_mask; unsigned events;
    void *user_data; int event_fd; uint64_t flags; const char *name;
    size_t am_alignment; uint64_t client_id;
} ucp_worker_params_t;

typedef void (*ucp_err_handler_cb_t)(void *arg, ucp_ep_h ep, ucs_status_t status);
typedef struct { ucp_err_handler_cb_t cb; void *arg; } ucp_err_handler_t;
typedef struct {
    uint64_t field_mask; const ucp_address_t *address; int err_mode;
    ucp_err_handler_t err_handler; void *user_data; unsigned flags;
    ucs_sock_addr_t sockaddr; void *conn_request; const char *name;
    ucs_sock_addr_t local_sockaddr;
} ucp_ep_params_t;

typedef struct {
    uint64_t field_mask; void *address; size_t length; unsigned flags; unsigned prot;
    int memory_type; const void *exported_memh_buffer;
} ucp_mem_map_params_t;

typedef struct {
    uint32_t op_attr_mask; uint32_t flags; void *request; void *cb;
    ucp_datatype_t datatype; void *user_data; void *reply_buffer; int memory_type;
    void *recv_info; ucp_mem_h memh;
    uint64_t tail[8];                          /* 1.22 grew the structure from 72 to 96 bytes */
} ucp_request_param_t;

typedef struct { uint64_t recv_attr; ucp_ep_h reply_ep; } ucp_am_recv_param_t;
typedef ucs_status_t (*ucp_am_recv_callback_t)(void *arg, const void *header, size_t header_length,
        void *data, size_t length, const ucp_am_recv_param_t *param);
typedef struct { uint64_t field_mask; unsigned id; uint32_t flags;
                 ucp_am_recv_callback_t cb; void *arg; } ucp_am_handler_param_t;
typedef struct { void *buffer; size_t length; } ucp_dt_iov_t;

typedef struct { const char *transport_name; const char *device_name; } ucp_transport_entry_t;
typedef struct { ucp_transport_entry_t *entries; unsigned num_entries; size_t entry_size; } ucp_transports_t;
typedef struct { uint64_t field_mask; char name[32]; char local_sockaddr[128]; char remote_sockaddr[128];
                 ucp_transports_t transports; void *user_data; uint64_t tail[8]; } ucp_ep_attr_t;

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
const char *ucp_get_version_string(void);
ucs_status_t ucp_config_read(const char *prefix, const char *filename, ucp_config_t **config_p);
ucs_status_t ucp_config_modify(ucp_config_t *config, const char *name, const char *value);
void ucp_config_release(ucp_config_t *config);
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params,
                              const ucp_config_t *config, ucp_context_h *context_p);
void ucp_cleanup(ucp_context_h context);
ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *worker_p);
void ucp_worker_destroy(ucp_worker_h worker);
ucs_status_t ucp_worker_get_address(ucp_worker_h worker, ucp_address_t **address_p, size_t *length_p);
void ucp_worker_release_address(ucp_worker_h worker, ucp_address_t *address);
unsigned ucp_worker_progress(ucp_worker_h worker);
ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int *fd);
ucs_status_t ucp_worker_arm(ucp_worker_h worker);
ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep_p);
ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t *param);
ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h ep, const ucp_request_param_t *param);
ucs_status_t ucp_ep_query(ucp_ep_h ep, ucp_ep_attr_t *attr);
ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memh_p);
ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memh);
ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memh, void **buffer_p, size_t *size_p);
void ucp_rkey_buffer_release(void *buffer);
ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h ep, const void *buffer, ucp_rkey_h *rkey_p);
void ucp_rkey_destroy(ucp_rkey_h rkey);
ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h worker, const ucp_am_handler_param_t *param);
ucs_status_ptr_t ucp_am_send_nbx(ucp_ep_h ep, unsigned id, const void *header, size_t header_length,
        const void *buffer, size_t count, const ucp_request_param_t *param);
ucs_status_ptr_t ucp_put_nbx(ucp_ep_h ep, const void *buffer, size_t count, uint64_t remote_addr,
        ucp_rkey_h rkey, const ucp_request_param_t *param);
ucs_status_ptr_t ucp_get_nbx(ucp_ep_h ep, void *buffer, size_t count, uint64_t remote_addr,
        ucp_rkey_h rkey, const ucp_request_param_t *param);
void ucp_request_free(void *request);
const char *ucs_status_string(ucs_status_t status);
"""

# Bits and enumerators of the same headers; the layout test compares these too.
FEATURE_RMA: Final = 1 << 1
FEATURE_WAKEUP: Final = 1 << 4
FEATURE_AM: Final = 1 << 6
OP_FIELD_CALLBACK: Final = 1 << 1
OP_FIELD_USER_DATA: Final = 1 << 2
OP_FIELD_DATATYPE: Final = 1 << 3
OP_FIELD_FLAGS: Final = 1 << 4
OP_FIELD_MEMORY_HANDLE: Final = 1 << 8
DATATYPE_IOV: Final = 2
AM_SEND_EAGER: Final = 1 << 1
AM_SEND_COPY_HEADER: Final = 1 << 3
AM_WHOLE_MESSAGE: Final = 1 << 0
ERROR_MODE_PEER: Final = 1
CLOSE_FORCE: Final = 1
THREAD_MODE_SINGLE: Final = 0
STATUS_BUSY: Final = -15
STATUS_CANCELED: Final = -16
STATUS_LAST: Final = -100
