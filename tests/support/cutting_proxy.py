"""A real TCP proxy that breaks every connection through it, once, at a chosen byte."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

PIECE = 64 * 1024


class CuttingProxy:
    """Forwards to a port of this machine; `up` counts the bytes of all connections towards it. At
    byte `cut_at` of them, `on_cut` is called and all connections of that moment are gone."""

    def __init__(self, target: int, cut_at: int, on_cut: Callable[[], None] = lambda: None) -> None:
        self.up = 0
        self._target, self._cut_at, self._on_cut = target, cut_at, on_cut
        self.was_cut = False
        self._lock = threading.Lock()
        self._lines: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self._break_all()
        assert self.was_cut, f"nothing was cut: only {self.up} bytes came by"

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # whoever is there has been killed
                    near.close()
                    continue
                with self._lock:
                    self._lines += [near, far]
                for ends in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE):
                if upwards and self._counted(len(piece)):
                    self._on_cut()
                    self._break_all()
                    return
                sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _counted(self, size: int) -> bool:
        """Whether it is time to cut."""
        with self._lock:
            self.up += size
            if self.was_cut or self.up < self._cut_at:
                return False
            self.was_cut = True
            return True

    def _break_all(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        for line in lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
