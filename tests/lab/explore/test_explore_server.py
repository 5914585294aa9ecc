"""The page's server over HTTP: who is let in, what hostile pictures get, and how it ends."""

import dataclasses
import http.client
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import kerneq.lab.explore.page as page
import kerneq.lab.explore.server as serving


def ask(server, path: str | None = None, body: bytes | None = None, **headers: str) -> tuple[int, str, dict]:
    """Send a request, by default for the page; returns the status, the text and the headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        path = f"/{server.token}/" if path is None else path
        connection.request("GET" if body is None else "POST", path, body, named)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)
    finally:
        connection.close()


def solve(server, query: str = "picture=0", body: bytes = b"", task: str = "solve", **headers: str) -> tuple[int, dict]:
    status, text, _ = ask(server, f"/{server.token}/{task}?{query}", body, **headers)
    return status, json.loads(text)


def file_of(picture: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def write_png(side: int, content: bytes) -> bytes:
    """A PNG file of one bit a pixel that claims to have this side, with this content."""
    chunks = [(b"IHDR", struct.pack(">2I5B", side, side, 1, 0, 0, 0, 0)), (b"IDAT", content), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_the_page_is_there_for_those_who_know_the_token_and_runs_nothing_but_its_own_script(server):
    status, text, headers = ask(server)
    assert status == 200 and server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    nonce = headers["Content-Security-Policy"].partition("script-src 'nonce-")[2].partition("'")[0]
    assert len(nonce) > 20 and text.count(f'nonce="{nonce}"') == 2 and "{{" not in text
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
    assert "http://" not in text.replace("http://www.w3.org/", "") and "https://" not in text
    assert ask(server, Host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize(
    "path", ["/", "/favicon.ico", "/wrong/", "/wrong/solve", "//", "*", "http://[", "/%00/", "/é/"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_without_the_token_there_is_nothing(server, method, path):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as line:
        line.sendall(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        answer = line.makefile("rb").read()
    assert b" 403 " in answer.splitlines()[0] and answer.endswith(b'needs the token that kerneq explore printed."}')


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "", "127.0.0.1:1@evil.example"])
def test_a_name_that_was_made_to_lead_here_is_refused_even_with_the_token(server, host):
    status, text, _ = ask(server, Host=host)
    assert status == 403 and json.loads(text)["problem"] == "This server answers at 127.0.0.1 only."


def test_it_listens_on_this_machine_alone_at_a_port_that_was_free(server, run):
    assert server.server_address[0] == "127.0.0.1" and server.server_port > 0
    with serving.Server(run) as other:
        assert other.server_port != server.server_port and other.token != server.token


def test_other_addresses_and_methods_are_refused(server):
    assert ask(server, f"/{server.token}/nothing")[0] == ask(server, f"/{server.token}/solve")[0] == 404
    assert ask(server, f"/{server.token}/../x", b"")[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("DELETE", f"/{server.token}/")
    assert connection.getresponse().status == 501
    connection.close()


def test_a_chosen_and_a_dropped_picture_are_solved_alike(server, run):
    status, chosen = solve(server, "picture=3&solver=proximal&tol=1e-3&steps=20&width=1.0")
    assert status == 200 and chosen["layers"][0]["converged"] and chosen["picture"].startswith("data:image/png;base64,")
    digit = Image.fromarray(server.pictures[3][1][0].numpy())
    status, dropped = solve(server, "picture=&solver=proximal&tol=1e-3&steps=20&width=1.0", file_of(digit))
    assert status == 200 and dropped == chosen


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("solver=newton", "`solver` must be one of own, proximal"),
        ("solver=picrd", "Did you mean `picard`?"),
        ("solver=<script>", "`solver` must be one of"),
        ("tol=0", "`tol` must be at least 1e-08"),
        ("tol=nan", "`tol`"),
        ("tol=" + "9" * 5000, "`tol`"),
        ("steps=101", "`steps` must be at most 100"),
        ("steps=1.5", "`steps` must be a whole number"),
        ("width=1e9", "`width` must be at most 64"),
        ("speed=1", "There is no setting `speed`"),
        ("picture=99", "`picture` must be a number below 10"),
        ("picture=-1", "`picture` must be a number"),
        ("picture=" + "9" * 5000, "`picture` must be a number"),
    ],
)
def test_settings_that_make_no_sense_get_a_sentence(server, query, words):
    status, found = solve(server, query)
    assert status == 400 and list(found) == ["problem"] and words in found["problem"] and len(found["problem"]) < 6000


ZEROS = zlib.compress(bytes(20_000 * 2501), 9)  # 20 000 rows of 20 000 pixels: 50 MB in 50 kB
BROKEN = {
    "nothing": b"",
    "text": b"hello",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    "html": b"<!doctype html><script>alert(1)</script>",
    "pdf": b"%PDF-1.7 ...",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage",
    "zip": b"PK\x03\x04" + bytes(100),
    "half a png": file_of(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8)))[:900],
    "20 000 x 20 000": write_png(20_000, ZEROS),
    "bomb": write_png(9_000, zlib.compress(bytes(10**7), 9) + b"more"),
    "noise in a png": write_png(20, b"no zlib"),
    "animation": b"GIF89a" + bytes(30),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_or_hostile_picture_gets_one_sentence(server, name, capfd):
    status, found = solve(server, "picture=", BROKEN[name])
    assert status == 400 and list(found) == ["problem"], found
    assert found["problem"].startswith("The picture ") and "/" not in found["problem"] and len(found["problem"]) < 250
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("length", [str(10 * 2**30), str(serving.LARGEST + 1), "-1", "many", "9" * 5000, "١"])
def test_a_length_that_is_too_large_or_none_is_refused_before_it_arrives(server, length):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as line:
        head = f"POST /{server.token}/solve?picture= HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
        line.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
        answer = line.makefile("rb").read()
    assert b" 413 " in answer.splitlines()[0] and b"must say its size, which may be 64 MB" in answer


def test_one_computation_runs_at_a_time_and_the_page_is_served_meanwhile(server, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def wait(*arguments):
        begun.set()
        assert go.wait(30)
        return {}

    monkeypatch.setattr(serving, "watch", wait)
    found = []
    first = threading.Thread(target=lambda: found.append(solve(server)))
    first.start()
    assert begun.wait(30)
    assert solve(server) == (409, {"problem": "Another computation is running, and there is one at a time: wait."})
    assert ask(server)[0] == 200
    go.set()
    first.join()
    assert found[0][0] == 200 and solve(server)[0] == 200


def test_a_browser_that_goes_away_is_no_event_and_a_bug_is_told_as_one(server, monkeypatch, capfd):
    for request in (
        b"",
        b"GET",
        f"GET /{server.token}/ HTTP/1.0\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode(),
    ):
        with socket.create_connection(("127.0.0.1", server.server_port)) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
            line.sendall(request)
    assert ask(server)[0] == 200 and capfd.readouterr().err == ""
    monkeypatch.setattr(serving, "watch", lambda *arguments: 1 / 0)
    with pytest.raises(http.client.RemoteDisconnected):
        solve(server)
    assert "ZeroDivisionError" in capfd.readouterr().err and not server.computing.locked()


def test_names_of_classes_end_no_script(run):
    data = {"model": {"name": "</script><script>alert(1)</script>", "classes": ["<!--", "\u202e"]}}
    text = page.render(data, "n").decode()
    assert text.count("</script>") == 2 and "<!--" not in text and "\\u003c/script>" in text


def test_the_program_opens_the_page_and_ends_cleanly_on_ctrl_c_in_the_middle_of_a_computation(run):
    command = [sys.executable, "-m", "kerneq", "explore", str(run.run.path), "--no-browser", "--device", "cpu"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    said = program.stdout.readline()
    assert "Ctrl-C" in said
    _, _, host, token, _ = said.split(" at ")[1].split(" ")[0].split("/")
    with socket.create_connection(host.split(":"), timeout=30) as line:
        line.sendall(f"POST /{token}/certify?picture=0 HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode())
        time.sleep(0.5)  # of seconds
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (0, "Closed.\n", "")


@pytest.mark.parametrize("name", ["", "page.pdf", "folder.html"])
def test_a_page_is_exported_to_an_html_file_only(name, run, kerneq, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    code, _, err = kerneq("explore", run.run.path, "--export", name, "--device", "cpu")
    assert code == 2 and "written to a file that ends in .html" in err


def test_the_command_exports_a_page_of_three_examples(run, kerneq, tmp_path):
    file = tmp_path / "demo.html"
    code, out, err = kerneq("explore", run.run.path, "--export", file, "--device", "cpu")
    assert (code, err) == (0, "") and "Written to" in out
    text = file.read_text()
    data = json.loads(text.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])
    assert [example["title"] for example in data["examples"]] == ["Digit 0", "Digit 1", "Digit 2"]
    assert all("Radius" in example["certificate"] for example in data["examples"])
    assert len(text) < 1_500_000 and "http://" not in text.replace("http://www.w3.org/", "")


def test_without_weights_that_ship_a_small_model_is_trained(tmp_path, monkeypatch):
    assert page.choose_run(tmp_path).name == "geq-6m-imagenette" and not list(tmp_path.iterdir())
    monkeypatch.setattr(page, "names", tuple)
    monkeypatch.setattr(page, "train", lambda config, folder: folder.mkdir())
    assert page.choose_run(tmp_path) == tmp_path / "geq-tiny-digits"


def test_photographs_are_offered_to_a_model_of_colours(run):
    seen = dataclasses.replace(
        run.seen, pixels=torch.empty(0, 3, 32, 32, dtype=torch.uint8), mean=(0.5,) * 3, std=(0.2,) * 3
    )
    found = page.list_pictures(dataclasses.replace(run, seen=seen))
    assert len(found) == 3 and all(pixels.shape == (3, 32, 32) for _, pixels in found)
