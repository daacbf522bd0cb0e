"""The inside of the sandbox: run one program on each of its tests and report what came out.

`policy.code_sandbox` starts this file's text as process 1 of a process namespace of its own; it imports the standard
library only. A test is a forked child that compiles and runs the program, so tests share no state and one start of
Python serves them all. The expected outputs never come here: a program that gets hold of this process can change what
is reported of its own output and nothing else.

Standard input holds the job, a JSON object. Standard output gets frames: a JSON line [status, detail, n], then n bytes.
"""

import builtins
import json
import os
import resource
import select
import signal
import sys
import time
import types

KILLED_FOR = {signal.SIGXCPU: "timeout", signal.SIGKILL: "memory"}  # SIGKILL: the host ran out of memory
PRELUDE = (
    "bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "math", "operator", "random",
    "re", "string", "sys", "time", "typing",
)  # fmt: skip
STARRED = ("bisect", "collections", "functools", "heapq", "itertools", "math", "typing")


def serve(job):
    """Run the tests in order; the first that times out is the last. A forked child returns early, as the program."""
    if job["uid"] is not None:  # root: a user of its own, whose processes the kernel counts apart
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    sys.path += job["packages"]
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    names = prelude() if job["fn_name"] else {}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    report("ready", "", b"")
    for index, given in enumerate(job["inputs"]):
        folder = os.path.abspath(f"test{index}")
        os.mkdir(folder)
        (stdin, feed), (out, stdout), (told, tell) = os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            become_program(stdin, stdout, (feed, out, told, wake, woken))
            confine(job)
            return play(job, given, tell, names)
        for end in (stdin, stdout, tell):
            os.close(end)
        data = b"" if job["fn_name"] else given.encode("utf-8", "surrogatepass")
        outcome = follow(pid, Pipes(feed, out, told, data=data, wake=wake, limit=job["output_bytes"]), job)
        clean(folder)
        report(*outcome)
        if outcome[0] in ("timeout", "compile_error"):
            break


def prelude():
    """Names that call-based problems take for granted: their starter code says List[int] and imports nothing."""
    names = {name: __import__(name) for name in PRELUDE}
    for name in STARRED:
        module = names[name]
        public = getattr(module, "__all__", None) or [key for key in vars(module) if key[0] != "_"]
        names |= {key: getattr(module, key) for key in public if key not in PRELUDE and not hasattr(builtins, key)}
    return names


def report(status, detail, payload):
    """Write one frame."""
    data = json.dumps([status, detail[:200], len(payload)]).encode() + b"\n" + payload
    while data:
        data = data[os.write(1, data) :]


# In the child ---------------------------------------------------------------------------------------------------------


def become_program(stdin, stdout, others):
    """Leave the child nothing but the pipes of its test: standard error goes nowhere."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, end in enumerate((stdin, stdout, nowhere)):
        os.dup2(end, number)
        os.close(end)
    for end in others:
        os.close(end)
    os.environ.clear()  # of the locale that Python itself sets
    sys.argv = ["program.py"]
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        stream = os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)
        vars(sys).update({name: stream, f"__{name}__": stream})


def confine(job):
    """Set the limits that the kernel keeps for each process; no descendant can raise them."""
    seconds, memory = int(job["timeout"]) + 1, job["memory_mb"] * 2**20
    for name, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, job["file_bytes"], job["file_bytes"]),
        (resource.RLIMIT_NOFILE, job["open_files"], job["open_files"]),
        (resource.RLIMIT_NPROC, job["processes"], job["processes"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))


def play(job, given, tell, names):
    """Compile and run the program, and call its function where the problem names one."""

    def say(kind, text):
        data = f"{kind}\n{text}".encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(tell, data) :]

    try:
        code = compile(job["program"], "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        say("compile_error", describe(error))
        sys.exit(1)
    module = types.ModuleType("solution" if job["fn_name"] else "__main__")
    vars(module).update(names)
    sys.modules[module.__name__] = module
    try:
        exec(code, vars(module))
        if job["fn_name"]:
            say("value", plain(function_of(module, job["fn_name"])(*map(integer_keys, given))))
    except SystemExit:
        raise
    except MemoryError:
        say("memory", "MemoryError")
        sys.exit(1)
    except BaseException as error:
        say("runtime_error", describe(error))
        sys.exit(1)


def describe(error):
    """Say what was raised, in a line."""
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except BaseException:
        return type(error).__name__


def function_of(module, name):
    """Find the function of a call-based problem: a method of `Solution`, or else a global."""
    solution = getattr(module, "Solution", None)
    owner = solution() if isinstance(solution, type) and hasattr(solution, name) else module
    if not hasattr(owner, name):
        raise NameError(f"the program defines no '{name}'")
    return getattr(owner, name)


def integer_keys(argument):
    """Give a dictionary its integer keys back, which JSON turned into text."""
    if isinstance(argument, dict) and all(key.lstrip("-").isdecimal() for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def plain(value):
    """Write a returned value as JSON, tuples as lists; nothing for what JSON cannot say, which then equals nothing."""

    def array(thing):
        if type(thing).__module__ == "numpy":
            return thing.tolist()
        raise TypeError

    try:
        return json.dumps(value, default=array)
    except (TypeError, ValueError, RecursionError):
        return ""


# Around the child -----------------------------------------------------------------------------------------------------


def follow(pid, pipes, job):
    """See a test through until all its processes have ended, or it breaks a limit and they are ended.

    Returns:
        Status ("ran", or why there is nothing to compare), detail, payload.
    """
    deadline, state = time.monotonic() + job["timeout"], None
    while True:
        left = deadline - time.monotonic()
        pipes.move(max(left, 0))
        state, running = reap(pid, state)
        if not running:
            pipes.read()
        if pipes.fullest > job["output_bytes"]:
            outcome = "output", "", b""
        elif not running:
            outcome = verdict(state, pipes.printed, pipes.said, job["fn_name"])
        elif left <= 0:
            outcome = "timeout", "" if state is None else "left a process running", b""
        else:
            continue
        pipes.close()
        end_all()
        return outcome


class Pipes:
    """Our ends of a test's pipes: what it reads, what it prints, and what `play` says of it."""

    def __init__(self, feed, out, told, *, data, wake, limit):
        self.feed, self.out, self.told, self.wake, self.limit = feed, out, told, wake, limit
        self.data, self.buffers, self.poll = memoryview(data), {out: bytearray(), told: bytearray()}, select.poll()
        for end, events in ((feed, select.POLLOUT), (out, select.POLLIN), (told, select.POLLIN)):
            os.set_blocking(end, False)
            self.poll.register(end, events)
        self.poll.register(wake, select.POLLIN)
        self.poll.register(1, 0)  # an error there: nobody reads our reports any more
        self.open = {feed, out, told}

    printed = property(lambda self: bytes(self.buffers[self.out]))
    said = property(lambda self: bytes(self.buffers[self.told]))
    fullest = property(lambda self: max(map(len, self.buffers.values())))

    def move(self, seconds):
        """Wait until something can be moved or a process has ended, and move it."""
        ready = {end for end, _ in self.poll.poll(seconds * 1000)}
        if 1 in ready:
            os._exit(1)  # the kernel ends the rest of this namespace
        if self.wake in ready:
            os.read(self.wake, 4096)
        if self.feed in ready:
            self.write()
        self.read(ready)

    def write(self):
        """Write what fits, and close the pipe when all is written or nobody reads."""
        try:
            self.data = self.data[os.write(self.feed, self.data) :]
        except BlockingIOError:
            return
        except OSError:
            self.data = self.data[:0]
        if not self.data:
            self.shut(self.feed)

    def read(self, ready=None):
        """Read what is there, from all pipes or those that are ready, to a little above the limit."""
        for end, buffer in self.buffers.items():
            while end in self.open and (ready is None or end in ready) and len(buffer) <= self.limit:
                try:
                    part = os.read(end, 65536)
                except BlockingIOError:
                    break
                buffer += part
                if not part:
                    self.shut(end)

    def shut(self, end):
        """Close one end."""
        self.poll.unregister(end)
        self.open.discard(end)
        os.close(end)

    def close(self):
        """Close all that is open."""
        for end in tuple(self.open):
            self.shut(end)


def reap(pid, state):
    """Collect the processes that have ended: the wait status of the test's first one, and whether any is left."""
    while True:
        try:
            done, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return state, False
        if done == 0:
            return state, True
        if done == pid:
            state = status


def end_all():
    """Kill and reap every other process of the namespace."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)
        except (ProcessLookupError, ChildProcessError):
            return


def verdict(state, out, told, fn_name):
    """Say what a test that ended by itself came to, from what it said and how it exited."""
    kind, _, text = told.partition(b"\n")
    detail = text.partition(b"\n")[0].decode("utf-8", "replace")
    code = os.waitstatus_to_exitcode(state)
    if kind in (b"compile_error", b"memory", b"runtime_error"):
        return kind.decode(), detail, b""
    if code < 0:
        return KILLED_FOR.get(-code, "runtime_error"), f"ended by signal {-code}", b""
    if code:
        return "runtime_error", f"ended with exit status {code}", b""
    if fn_name and kind != b"value":
        return "runtime_error", f"ended before {fn_name} returned", b""
    return "ran", "", text if fn_name else out


def clean(folder):
    """Remove what a test left on the disk."""
    if os.listdir(folder):
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if os.getpid() != 1:  # `end_all` would end the user's other processes
        sys.exit("code_runner.py runs only as process 1 of a namespace of its own.")
    with open(0, "rb", closefd=False) as job:
        serve(json.load(job))
