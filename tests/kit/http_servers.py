"""HTTP servers on the loopback interface."""

import contextlib
import http.server
import threading


@contextlib.contextmanager
def http_server(answer):
    """Runs a server, and yields its host with the port.

    `answer` receives a request, with the attributes `command`, `path`, `headers` and `body`, and returns the status, the headers
    and the body of the response.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        log_message = lambda *_: None

        def do_GET(self):
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            status, headers, body = answer(self)
            with contextlib.suppress(OSError):  # the client may have closed the connection
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        yield f"127.0.0.1:{server.server_port}"
