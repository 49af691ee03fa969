"""The job's secret: where it comes from, and the key that is made of it.

Processes of one job share a secret; with it, a handshake proves that both sides belong to the job (SECURITY.md).

    FABRIC_SECRET_FILE=/run/job/secret      a file that only we can read: the better way
    FABRIC_SECRET=...                       the text itself: other processes of our uid can read our environment

There is no way to give it on a command line, where every user of the machine could see it. Backends get a key derived
from it, so that the secret itself is in as few places as possible. Imports the standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from typing import Any

from fabric_core.errors import ConfigError

__all__ = ["LEAST_BYTES", "handshake_key", "origin"]

LEAST_BYTES = 16  #: a shorter secret could be guessed
_MOST_BYTES = 65536
_PURPOSE = b"fabric handshake v1"
_MAKE_ONE = "make one with `head -c 32 /dev/urandom | base64`"


def origin(settings: Any) -> str:
    """Return the variable that the secret of these settings comes from, or "" if there is none."""
    if settings.secret is not None and settings.secret_file is not None:
        raise ConfigError("FABRIC_SECRET and FABRIC_SECRET_FILE are both set: which is meant? Set one")
    return "FABRIC_SECRET" if settings.secret is not None else "FABRIC_SECRET_FILE" if settings.secret_file else ""


def handshake_key(settings: Any) -> bytes | None:
    """Return the 32 bytes that authenticate handshakes, or None if the job has no secret.

    For backends: hand it to whatever makes first contact, and keep it out of every text. Raises ConfigError if the
    secret is too short, or its file is missing, open to others, or not ours.
    """
    source = origin(settings)
    if not source:
        return None
    if source == "FABRIC_SECRET":
        secret: bytes = os.fsencode(settings.secret.get_secret_value()).strip()  # any bytes, stripped as a file's are
    else:
        secret = _read(settings.secret_file)
    if len(secret) < LEAST_BYTES:
        where = source if source == "FABRIC_SECRET" else f"FABRIC_SECRET_FILE={settings.secret_file}"
        raise ConfigError(f"{where}: a secret has at least {LEAST_BYTES} bytes, this one {len(secret)}; {_MAKE_ONE}")
    return hmac.digest(secret, _PURPOSE, hashlib.sha256)


def _read(path: str) -> bytes:
    label = f"FABRIC_SECRET_FILE={path}"
    try:
        # O_NONBLOCK: a pipe without a writer must not hold us up; what is looked at below is what was opened.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}; {_MAKE_ONE}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(f"{label}: is no regular file")
        if info.st_uid != os.geteuid():
            raise ConfigError(
                f"{label}: belongs to uid {info.st_uid}, not to us (uid {os.geteuid()}); chown it, or copy it"
            )
        if info.st_mode & 0o077:
            mode = stat.S_IMODE(info.st_mode)
            raise ConfigError(f"{label}: has mode {mode:04o}, so others can read or change it; chmod 600 {path}")
        content = b""
        while len(content) <= _MOST_BYTES and (more := os.read(fd, _MOST_BYTES + 1 - len(content))):
            content += more
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{label}: has more than {_MOST_BYTES} bytes; {_MAKE_ONE}")
    return content.strip()
