"""Outputs that cannot be finished (a full disk, a signal) leave no file behind, and an older one as it was."""
import os
import shutil
import signal
import subprocess
import time

from cli import SAMPLE, TIERKV, CliTest, main, run

OLDER = b"older"


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
                        ("calibrate", "--basis", "matrix", SAMPLE, "-o", out), ("synth", "-o", out, "--tokens", 500),
                        ("convert", SAMPLE, disk / "out.safetensors")):
            for kibibytes in (4, 8, 40, 300):
                where = f"seed {self.seed}: {command} with {kibibytes} KiB"
                r = on_disk(kibibytes, TIERKV, *command)
                self.assertEqual(r.returncode, 3, f"{where}: {r.stderr}")
                self.assertIn("disk/out", r.stderr, where)
                self.assertIn("cannot be ", r.stderr, where)
                self.assertEqual(r.stdout, "", where)

    def test_a_signal(self):
        dump, big = self.dir / "big.h5", self.dir / "big.tkv"
        self.assertEqual(run("synth", "-o", dump, "--layers", 12, "--tokens", 4000, "--seed", self.seed).returncode, 0)
        self.assertEqual(run("compress", "--preset", "k8v4", dump, big).returncode, 0)
        self.before = sorted(os.listdir(self.dir))
        for command in (("compress", "--preset", "step", dump, self.out), ("compress", "--preset", "step", "--threads", 1, dump, self.out),
                        ("decompress", big, self.out), ("decompress", "--gzip", 1, big, self.out)):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                where = f"seed {self.seed}: {command} and {number.name}"
                p = subprocess.Popen([TIERKV, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                while p.poll() is None and not any(n.endswith(".part") for n in os.listdir(self.dir)):
                    time.sleep(0.0005)
                p.send_signal(number)
                p.communicate(timeout=300)
                self.assertEqual(p.returncode, -number, where)
                self.expect_untouched(where)


if __name__ == "__main__":
    main()
