"""A small client for a Consul-like agent: look up, register and deregister services.

The agent is reached over TCP, or over a unix socket when its host is a path. It speaks the
lookup endpoint `/v1/lookup/name` of ByteDance's agents, which a stock Consul does not have.

Differences from ByteDance's Monolith: the cached lookup does not deadlock, the default socket is
found, connections are closed, names are quoted, `deregister` and `close` stop the heartbeat. A
service registered with a check script gets no heartbeat, because the agent runs the script itself.
An empty answer is never served from the cache.
"""

import json
import os
import socket
import stat
import threading
import time
import traceback
import urllib.parse
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any, Optional

from absl import logging

from monolith.native_training import net_utils

_DEFAULT_HOST = "127.0.0.1"
_DEFAULT_PORT = 2280
_FIRST_CACHED_LOOKUP_TIMEOUT_SECS = 30
_REGISTRATION_TIMEOUT_SECS = 15
_HEALTH_CHECK_PERIOD_SECS = 30
_HEALTH_CHECK_RETRY_SECS = 2


class ConsulException(Exception):
  """The agent refused a request or answered nonsense; the text is its answer."""


class UnixHTTPConnection(HTTPConnection):
  """HTTP over the unix socket at `path`."""

  def __init__(self, path: str, **kwargs):
    super().__init__("localhost", **kwargs)
    self._path = path

  def connect(self) -> None:
    self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if self.timeout is not socket._GLOBAL_DEFAULT_TIMEOUT:
      self.sock.settimeout(self.timeout)
    self.sock.connect(self._path)


class Client:
  """Talks to the agent named by the environment. Thread-safe.

  The host is `CONSUL_HTTP_HOST`, else `TCE_HOST_IP`, else the socket `_consul_sock` where there is
  one, else 127.0.0.1; the port is `CONSUL_HTTP_PORT`, else 2280.
  """

  _consul_sock = "/opt/tmp/sock/consul.sock"

  def __init__(self):
    self._consul_host = os.environ.get("CONSUL_HTTP_HOST") or os.environ.get("TCE_HOST_IP")
    if not self._consul_host:
      self._consul_host = self._consul_sock if _is_socket(self._consul_sock) else _DEFAULT_HOST
    self._consul_port = net_utils.check_port_number(
      os.environ.get("CONSUL_HTTP_PORT") or _DEFAULT_PORT, "CONSUL_HTTP_PORT"
    )
    self._cache: dict[str, dict[str, Any]] = {}
    self._health_stops: dict[str, threading.Event] = {}
    self._lock = threading.Lock()

  def lookup(self, name: str, timeout: float = 3, cachetime: float = 0) -> list[dict[str, Any]]:
    """Finds the instances of a service.

    Args:
      name: the service.
      timeout: seconds; at least 30 for the first lookup of a name with a cache.
      cachetime: how old, in seconds, a remembered answer may be; 0 always asks.

    Returns:
      The agent's list, empty when it answered with an error status.

    Raises:
      OSError: if the agent cannot be reached or does not answer in time.
      ConsulException: if its answer is not JSON.
    """
    if cachetime > 0:
      with self._lock:
        entry = self._cache.get(name)
      if entry is None:
        timeout = max(timeout, _FIRST_CACHED_LOOKUP_TIMEOUT_SECS)
      elif time.time() - entry["cachetime"] <= cachetime:
        return entry["ret"]
    ret = self._lookup(name, timeout)
    if ret:
      with self._lock:
        self._cache[name] = {"ret": ret, "cachetime": time.time()}
    return ret

  def _lookup(self, name: str, timeout: float) -> list[dict[str, Any]]:
    query = f"name={urllib.parse.quote(name, safe='')}&addr-family=dual-stack"
    status, body = self._call("GET", f"/v1/lookup/name?{query}", timeout=timeout)
    if status != HTTPStatus.OK:
      logging.error("consul: %s %s", status, body)
      return []
    try:
      ret = json.loads(body)
    except ValueError as e:
      raise ConsulException(f"lookup of {name!r} gave malformed JSON: {_text(body)[:200]!r}") from e
    if not isinstance(ret, list):
      raise ConsulException(f"lookup of {name!r} gave no list: {_text(body)[:200]!r}")
    return ret

  def register(
    self,
    name: str,
    port: int,
    tags: Optional[dict[str, Any]] = None,
    check_script: Optional[str] = None,
    host: Optional[str] = None,
  ) -> None:
    """Registers this process as an instance of a service and keeps it alive.

    Args:
      name: the service.
      port: where this process listens.
      tags: sent as `key:value` strings.
      check_script: run by the agent every 30 s instead of a heartbeat from here.
      host: the agent, if not the default one.

    Raises:
      OSError: if the agent cannot be reached.
      ConsulException: if it refuses.
    """
    service_id = f"{name}-{port}"
    payload = {
      "id": service_id,
      "name": name,
      "port": net_utils.check_port_number(port),
      "check": {"ttl": "60s"},
    }
    if tags is not None:
      payload["tags"] = [f"{key}:{value}" for key, value in tags.items()]
    if check_script:
      payload["check"] = {"interval": "30s", "script": check_script}
    status, body = self._call(
      "PUT", "/v1/agent/service/register", body=json.dumps(payload), host=host
    )
    if status != HTTPStatus.OK:
      raise ConsulException(_text(body))
    self._stop_health_check(service_id)
    if not check_script:
      self._start_health_check(service_id, host)

  def deregister(self, name: str, port: int, host: Optional[str] = None) -> None:
    """Takes an instance back, and stops its heartbeat.

    Raises:
      OSError: if the agent cannot be reached.
      ConsulException: if it refuses.
    """
    service_id = f"{name}-{port}"
    self._stop_health_check(service_id)
    status, body = self._call(
      "PUT", f"/v1/agent/service/deregister/{urllib.parse.quote(service_id, safe='')}", host=host
    )
    if status != HTTPStatus.OK:
      raise ConsulException(_text(body))

  def close(self) -> None:
    """Stops all heartbeats; what is registered expires after its 60 s."""
    with self._lock:
      stops, self._health_stops = self._health_stops, {}
    for stop in stops.values():
      stop.set()

  def _call(
    self,
    method: str,
    path: str,
    body: Optional[str] = None,
    timeout: Optional[float] = None,
    host: Optional[str] = None,
  ) -> tuple[int, Any]:
    """Makes one request on its own connection; returns the status and the raw body.

    Without a `timeout` it is that of registrations.
    """
    host = host or self._consul_host
    timeout = _REGISTRATION_TIMEOUT_SECS if timeout is None else timeout
    if host.startswith("/"):
      connection = UnixHTTPConnection(host, timeout=timeout)
    else:
      connection = HTTPConnection(host, self._consul_port, timeout=timeout)
    try:
      if body is None:
        connection.request(method, path)
      else:
        connection.request(method, path, body)
      response = connection.getresponse()
      return response.status, response.read()
    finally:
      connection.close()

  def _start_health_check(self, service_id: str, host: Optional[str]) -> None:
    stop = threading.Event()
    with self._lock:
      self._health_stops[service_id] = stop
    threading.Thread(
      target=self._health_check,
      args=(service_id, host, stop),
      name=f"ConsulHealthCheck-{service_id}",
      daemon=True,
    ).start()

  def _stop_health_check(self, service_id: str) -> None:
    with self._lock:
      stop = self._health_stops.pop(service_id, None)
    if stop is not None:
      stop.set()

  def _health_check(self, service_id: str, host: Optional[str], stop: threading.Event) -> None:
    path = f"/v1/agent/check/pass/service:{urllib.parse.quote(service_id, safe='')}"
    while not stop.is_set():
      try:
        status, body = self._call("GET", path, host=host)
        if status != HTTPStatus.OK:
          logging.error("consul: %s %s", status, body)
      # An agent that restarts in the middle of an answer shows as an HTTPException.
      except (OSError, HTTPException):
        traceback.print_exc()
        stop.wait(_HEALTH_CHECK_RETRY_SECS)
        continue
      stop.wait(_HEALTH_CHECK_PERIOD_SECS)


def _is_socket(path: str) -> bool:
  try:
    return stat.S_ISSOCK(os.stat(path).st_mode)
  except OSError:
    return False


def _text(body: Any) -> str:
  return body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
