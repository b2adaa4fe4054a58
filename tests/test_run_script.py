"""`diagkit run` beside plain Python, script by script: same words, same exit, same traceback, same `__main__`."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTHING_SEEN = "diagkit: no FSDP2 model was seen in this process, so there is no trace\n"

SCRIPTS = {
    "ends well": "print('done')",
    "its arguments": "import sys; print(sys.argv[1:], sys.argv[0].endswith('job.py'))",
    "its main": """
        import sys
        print(__name__, __file__, __package__, __spec__, sys.modules["__main__"].__dict__ is globals())
        print(sys.path[0], __builtins__.__name__, __doc__)
    """,
    "a neighbour's import": "import neighbour; print(neighbour.NAME)",
    "exit with a code": "import sys; sys.exit(3)",
    "exit with words": "import sys; sys.exit('no more data')",
    "exit without a code": "import sys; sys.exit()",
    "an exception": """
        def inner():
            raise ValueError("wrong batch")

        def outer():
            inner()

        outer()
    """,
    "an exception from another": """
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("no such key") from error
    """,
    "an error of ours, raised by the script": """
        from diagkit.errors import UsageError
        raise UsageError("the script's own")
    """,
    "a missing module": "import a_module_that_is_not_there",
    "a syntax error": "x = = 1",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "a hook of its own": """
        import sys
        sys.excepthook = lambda kind, error, traceback: print("hook", kind.__name__, traceback.tb_frame.f_code.co_name)
        1 / 0
    """,
    "what is left for the exit": """
        import atexit, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        raise OSError("before the thread ends")
    """,
    "a class that is pickled": """
        import pickle
        class Thing: pass
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    """,
    "a process that it starts": """
        import multiprocessing
        def work(n): print("child", n, flush=True)
        if __name__ == "__main__":
            for how in ("fork", "spawn"):
                child = multiprocessing.get_context(how).Process(target=work, args=(how,))
                child.start(); child.join()
    """,
    "options that look like ours": "import sys; print(sys.argv[1:])",
}
ARGUMENTS = {
    "its arguments": ["--epochs", "1", "-m", "x", "--", "y"],
    "options that look like ours": ["--out", "here", "--simulate"],
}


def python(*words: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=60, env=environment
    )


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "neighbour.py").write_text("NAME = 'next door'\n")
    return tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_run_as_python_runs_it(name: str, folder: pathlib.Path) -> None:
    (folder / "job.py").write_text(textwrap.dedent(SCRIPTS[name]))
    words = ["job.py", *ARGUMENTS.get(name, [])]
    plain = python(*words, cwd=folder)
    ours = python("-m", "diagkit", "run", "--out", "traces", *words, cwd=folder)
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    crashed = plain.returncode == 1 and not name.startswith("exit with")
    assert ours.stderr == plain.stderr + (NOTHING_SEEN if crashed else "")
    assert not (folder / "traces").exists()


@pytest.mark.parametrize(
    ("files", "module"),
    [
        ({"job/__init__.py": "", "job/part.py": ""}, "job.part"),
        ({"job/__init__.py": "", "job/__main__.py": ""}, "job"),
        ({"job.py": ""}, "job"),
    ],
)
def test_a_module_is_run_as_python_runs_it(files: dict[str, str], module: str, tmp_path: pathlib.Path) -> None:
    body = "import sys; print(__name__, __file__, __package__, __spec__.name, sys.argv, sys.path[0]); 1 / 0\n"
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(files[name] or ("" if name.endswith("__init__.py") else body))
    plain = python("-m", module, "a", "--b", cwd=tmp_path)
    ours = python("-m", "diagkit", "run", "-m", module, "a", "--b", cwd=tmp_path)
    # Python shows its own two frames of `-m`; under diagkit the module's frame comes first.
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode == 1
    assert ours.stderr.splitlines()[1].strip().startswith(f'File "{tmp_path}')
    assert "ZeroDivisionError: division by zero" in ours.stderr
    assert "diagkit/" not in ours.stderr.replace(str(tmp_path), "")


MISTAKES = [
    ([], "nothing to run: expected a script, or -m MODULE"),
    (["missing.py"], "cannot read the script: found No such file or directory (at missing.py)"),
    (["-m", "a.module.that.is.not.there"], "cannot find the module: found a.module.that.is.not.there"),
    (["--ranks", "1..3", "job.py"], "--ranks makes no sense: found 1..3, expected ranks such as 0-3,7"),
    (["--detail", "all", "job.py"], "--detail makes no sense: found all, expected one of phases, transitions, full"),
    (["--limit", "much", "job.py"], "--limit makes no sense: found much, expected a size such as 200M"),
    (["--quiet", "-1", "job.py"], "--quiet makes no sense: found -1, expected seconds, such as 300 (0: never)"),
    (["--engines", "Engine", "job.py"], "--engines makes no sense: found Engine, expected classes such as"),
    (["."], "cannot run a folder: found ."),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[" ".join(words) or "nothing" for words, _ in MISTAKES])
def test_a_mistake_of_ours_is_one_line_and_exit_code_two(words: list[str], said: str, folder: pathlib.Path) -> None:
    (folder / "job.py").write_text("print('must not run')")
    result = python("-m", "diagkit", "run", *words, cwd=folder)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"diagkit run: error: {said}")


def test_an_option_in_the_environment_is_called_by_its_variable(folder: pathlib.Path) -> None:
    (folder / "job.py").write_text("")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    result = subprocess.run(
        [sys.executable, "-m", "diagkit", "run", "job.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "DIAGKIT_RANKS": "all"},
    )
    assert result.returncode == 2
    assert result.stderr.startswith("diagkit run: error: DIAGKIT_RANKS makes no sense: found all")
