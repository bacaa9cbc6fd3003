"""The declarations of pyucx against the real headers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pyucx import _cdef
from pyucx._library import ffi
from pyucx.bench import header_folder

_STRUCTS = {
    "ucp_params_t": ["features", "mt_workers_shared", "name"],
    "ucp_worker_params_t": ["thread_mode", "cpu_mask", "events", "event_fd", "flags"],
    "ucp_ep_params_t": ["address", "err_mode", "err_handler", "user_data", "flags", "sockaddr", "conn_request"],
    "ucp_mem_map_params_t": ["address", "length", "flags", "prot", "memory_type"],
    "ucp_request_param_t": ["flags", "request", "cb", "datatype", "user_data", "reply_buffer", "memory_type"],
    "ucp_am_handler_param_t": ["id", "flags", "cb", "arg"],
    "ucp_am_recv_param_t": ["reply_ep"],
    "ucp_dt_iov_t": ["buffer", "length"],
}
_CONSTANTS = {
    "UCP_FEATURE_RMA": _cdef.FEATURE_RMA,
    "UCP_FEATURE_WAKEUP": _cdef.FEATURE_WAKEUP,
    "UCP_FEATURE_AM": _cdef.FEATURE_AM,
    "UCP_OP_ATTR_FIELD_CALLBACK": _cdef.OP_FIELD_CALLBACK,
    "UCP_OP_ATTR_FIELD_USER_DATA": _cdef.OP_FIELD_USER_DATA,
    "UCP_OP_ATTR_FIELD_DATATYPE": _cdef.OP_FIELD_DATATYPE,
    "UCP_OP_ATTR_FIELD_FLAGS": _cdef.OP_FIELD_FLAGS,
    "UCP_DATATYPE_IOV": _cdef.DATATYPE_IOV,
    "UCP_AM_SEND_FLAG_EAGER": _cdef.AM_SEND_EAGER,
    "UCP_AM_FLAG_WHOLE_MSG": _cdef.AM_WHOLE_MESSAGE,
    "UCP_ERR_HANDLING_MODE_PEER": _cdef.ERROR_MODE_PEER,
    "UCP_EP_CLOSE_FLAG_FORCE": _cdef.CLOSE_FORCE,
    "UCS_ERR_BUSY": _cdef.STATUS_BUSY,
    "UCS_ERR_CANCELED": _cdef.STATUS_CANCELED,
    "UCS_ERR_LAST": _cdef.STATUS_LAST,
}


def _header_folders() -> list[Path]:
    found = [header_folder(), Path("/usr/include")]
    return [folder for folder in found if folder is not None and (folder / "ucp/api/ucp.h").exists()]


@pytest.mark.skipif(shutil.which("gcc") is None or not _header_folders(), reason="needs gcc and UCX headers")
@pytest.mark.parametrize("include", _header_folders(), ids=str)
def test_structures_and_constants_match_the_headers(include: Path, tmp_path: Path) -> None:
    """Every offset is the header's; a size may only be larger, for fields that a newer release appended."""
    lines = [f'printf("S {name} %zu\\n", sizeof({name}));' for name in _STRUCTS]
    lines += [f'printf("O {s} {f} %zu\\n", offsetof({s}, {f}));' for s, fields in _STRUCTS.items() for f in fields]
    lines += [f'printf("V {name} %lld\\n", (long long)({name}));' for name in _CONSTANTS]
    source = tmp_path / "sizes.c"
    body = "\n".join(lines)
    source.write_text(f"#include <stdio.h>\n#include <stddef.h>\n#include <ucp/api/ucp.h>\nint main(void){{{body}}}\n")
    program = tmp_path / "sizes"
    subprocess.run(["gcc", "-w", "-I", str(include), str(source), "-o", str(program)], check=True, timeout=60)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=10).stdout
    for kind, name, rest in re.findall(r"(\w) (\w+) (.+)", printed):
        if kind == "S":
            assert ffi.sizeof(name) >= int(rest), f"{name} is declared too short"
        elif kind == "O":
            field, offset = rest.split()
            assert ffi.offsetof(name, field) == int(offset), f"{name}.{field}"
        else:
            assert _CONSTANTS[name] == int(rest), name
