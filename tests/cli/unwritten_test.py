# SPDX-License-Identifier: Apache-2.0
"""Outputs that cannot be finished (a full disk, a signal) leave no file behind, and an older one as it was."""
import os
import resource
import shutil
import signal
import subprocess
import time

from cli import SAMPLE, TIERKV, CliTest, main, run

OLDER = b"older"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXCPU, signal.SIGALRM)


class Unwritten(CliTest):
    def setUp(self):
        super().setUp()
        self.tkv, self.st = self.dir / "in.tkv", self.dir / "in.safetensors"
        self.assertEqual(run("compress", "--preset", "step", SAMPLE, self.tkv).returncode, 0)
        self.out = self.dir / "out"
        self.out.write_bytes(OLDER)
        self.before = sorted(os.listdir(self.dir))

    def expect_untouched(self, where):
        self.assertEqual(sorted(os.listdir(self.dir)), self.before, where)
        self.assertEqual(self.out.read_bytes(), OLDER, where)

    def many_heads(self):
        """A dump whose profile takes a megabyte."""
        dump = self.dir / "many_heads.h5"
        self.assertEqual(run("synth", "-o", dump, "--layers", 16, "--q-heads", 32, "--kv-heads", 32, "--tokens", 16, "--queries", 8,
                             "--seed", self.seed).returncode, 0)
        return dump

    def test_a_full_disk(self):
        disk = self.dir / "disk"
        disk.mkdir()
        out = disk / "out"
        # A disk of its own, which ends with the command.
        script = 'mount -t tmpfs -o size="$0"k tmpfs "$1" && shift && "$@"; code=$?; ls -A "$DISK"; exit $code'
        environment = dict(os.environ, DISK=str(disk))

        def on_disk(kibibytes, *command):
            return subprocess.run(["unshare", "-rm", "sh", "-c", script, str(kibibytes), disk, *map(str, command)],
                                  capture_output=True, text=True, timeout=300, env=environment)

        if shutil.which("unshare") is None or on_disk(4, "true").returncode != 0:
            self.skipTest("needs leave to mount a tmpfs in a namespace of its own")
        for command in (("compress", "--preset", "k8v4", SAMPLE, out), ("decompress", self.tkv, out),
                        ("decompress", "--gzip", 1, self.tkv, out), ("decompress", "--threads", 1, self.tkv, out),
                        ("calibrate", "--no-thresholds", self.many_heads(), "-o", out), ("synth", "-o", out, "--tokens", 500),
                        ("convert", SAMPLE, disk / "out.safetensors")):
            for kibibytes in (4, 8, 40, 300):
                where = f"seed {self.seed}: {command} with {kibibytes} KiB"
                r = on_disk(kibibytes, TIERKV, *command)
                self.assertEqual(r.returncode, 3, f"{where}: {r.stderr}")
                self.assertIn("disk/out", r.stderr, where)
                self.assertIn("cannot be ", r.stderr, where)
                self.assertIn("No space left on device", r.stderr, where)
                self.assertEqual(r.stdout, "", where)

    def test_a_limit_of_file_sizes(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

        for command in (("compress", "--preset", "k8v4", SAMPLE, self.out), ("decompress", self.tkv, self.out),
                        ("synth", "-o", self.out, "--tokens", 500)):
            r = subprocess.run([TIERKV, *map(str, command), "--force"], capture_output=True, text=True, timeout=300,
                               preexec_fn=limit)
            self.assertEqual(r.returncode, 3, f"{command}: {r.stderr}")
            self.assertIn("File too large", r.stderr, command)
            self.expect_untouched(command)

    def test_out_of_memory(self):
        dump, out = self.dir / "in.h5", self.out
        self.assertEqual(run("synth", "-o", dump, "--tokens", 20000, "--significance", "none", "--seed", self.seed).returncode, 0)
        self.before = sorted(os.listdir(self.dir))
        for command in (("synth", "--tokens", 2**27, "-o", out), ("compress", "--preset", "small", dump, out), ("analyze", "--preset", "small", dump)):
            force = () if command[0] == "analyze" else ("--force",)
            r = subprocess.run([TIERKV, *map(str, command), *force], capture_output=True, text=True, timeout=300,
                               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (60 << 20, 60 << 20)))
            self.assertEqual((r.returncode, r.stdout, r.stderr), (3, "", f"tierkv: {command[0]}: out of memory\n"), command)
            self.expect_untouched(command)

    def interrupted(self, command, number, where):
        """The exit code of a command that is sent the signal as soon as it has begun a file."""
        p = subprocess.Popen([TIERKV, *map(str, command), "--force"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while p.poll() is None and not any(n.endswith(".part") for n in os.listdir(self.dir)):
            time.sleep(0.0005)
        p.send_signal(number)
        p.communicate(timeout=300)
        self.assertIn(p.returncode, (0, -number), where)
        return p.returncode

    def expect_ended(self, command, number):
        where = f"seed {self.seed}: {command} and {number.name}"
        self.assertEqual(self.interrupted(command, number, where), -number, where)
        self.expect_untouched(where)

    def long_commands(self):
        """(command, output): each takes a while."""
        dump, big, tensors = self.dir / "big.h5", self.dir / "big.tkv", self.dir / "big.safetensors"
        synth = ("synth", "--layers", 12, "--tokens", 4000, "--seed", self.seed, "-o")
        self.assertEqual(run(*synth, dump).returncode, 0)
        self.assertEqual(run("compress", "--preset", "k8v4", dump, big).returncode, 0)
        self.assertEqual(run("convert", dump, tensors).returncode, 0)
        # Their endings say what to convert to.
        to_tensors, to_dump = self.dir / "out.safetensors", self.dir / "out.h5"
        self.before = sorted(os.listdir(self.dir))
        return [(("compress", "--preset", "step", dump, self.out), self.out),
                (("compress", "--preset", "step", "--threads", 1, dump, self.out), self.out), (("decompress", big, self.out), self.out),
                (("decompress", "--gzip", 1, big, self.out), self.out), ((*synth, self.out), self.out),
                (("convert", dump, to_tensors), to_tensors), (("convert", tensors, to_dump), to_dump)]

    def test_a_signal(self):
        for command, _ in self.long_commands():
            for number in SIGNALS:
                self.expect_ended(command, number)

    def test_a_file_that_appears_meanwhile(self):
        commands = self.long_commands()
        commands.append((("calibrate", "--threads", 1, self.dir / "big.h5", "-o", self.out), self.out))
        for command, out in commands:
            for force in ((), ("--force",)) if command[0] == "compress" else ((),):
                out.unlink(missing_ok=True)
                p = subprocess.Popen([TIERKV, *map(str, command), *force], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                # calibrate begins its file at its end; it has looked at the output when it opens the dump.
                files, ending = f"/proc/{p.pid}/fd", "big.h5" if command[0] == "calibrate" else ".part"
                while not any(os.path.realpath(f"{files}/{n}").endswith(ending) for n in os.listdir(files)):
                    p.send_signal(signal.SIGCONT)
                    time.sleep(0.0005)
                    self.assertIsNone(p.poll(), command)
                    p.send_signal(signal.SIGSTOP)  # it waits while it is looked at
                out.write_bytes(OLDER)
                p.send_signal(signal.SIGCONT)
                said = p.communicate(timeout=300)[1]
                self.assertEqual(p.returncode, 0 if force else 3, f"{command}: {said}")
                self.assertEqual(sorted(os.listdir(self.dir)), sorted({*self.before, out.name}), command)
                if force:
                    self.assertNotEqual(out.read_bytes(), OLDER, command)
                else:
                    self.assertIn(f"{out}: cannot be written: it exists", said)
                    self.assertEqual(out.read_bytes(), OLDER, command)
            if out != self.out:
                out.unlink()

    def test_a_signal_while_a_profile_is_written(self):
        # Milliseconds, which the signal may miss: then the profile is there, whole.
        dump = self.many_heads()
        command = ("calibrate", "--no-thresholds", dump, "-o", self.out)
        self.before = sorted(os.listdir(self.dir))
        for number in SIGNALS:
            where = f"seed {self.seed}: calibrate and {number.name}"
            self.out.write_bytes(OLDER)
            if self.interrupted(command, number, where) != 0:
                self.expect_untouched(where)
                continue
            self.assertEqual(sorted(os.listdir(self.dir)), self.before, where)
            self.assertEqual(run("compress", "--preset", "step", "--profile", self.out, dump, self.tkv, "--force").returncode, 0, where)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGQUIT would leave one
    main()
