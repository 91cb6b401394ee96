# SPDX-License-Identifier: Apache-2.0
"""Where commands write: never over an input, over other files only with --force, through symlinks, and no device or pipe is replaced."""
import os
import stat

from cli import SAMPLE, CliTest, Dump, main, run

OLDER = b"older"


class Outputs(CliTest):
    def setUp(self):
        super().setUp()
        self.dump = Dump(seed=self.seed, layers=1, tokens=80, queries=16).write(self.dir / "in.h5")
        self.tkv, self.st = self.dir / "in.tkv", self.dir / "in.safetensors"
        self.assertEqual(run("compress", "--preset", "k8v4", self.dump, self.tkv).returncode, 0)
        self.assertEqual(run("convert", self.dump, self.st).returncode, 0)

    def commands(self, folder):
        """(command, output): every command that writes a file."""
        h5, tkv, st = (folder / name for name in ("out.h5", "out.tkv", "out.safetensors"))
        return ((("compress", "--preset", "k8v4", self.dump, tkv), tkv), (("decompress", self.tkv, h5), h5),
                (("decompress", "--gzip", 1, self.tkv, h5), h5), (("convert", self.dump, st), st), (("convert", self.st, h5), h5),
                (("calibrate", "--no-thresholds", self.dump, "-o", h5), h5), (("synth", "-o", h5, "--tokens", 20), h5))

    def files(self):
        return {p.name: p.read_bytes() for p in self.dir.iterdir() if p.is_file()}

    def test_what_exists_is_replaced_on_demand_only(self):
        for command, out in self.commands(self.dir):
            out.write_bytes(OLDER)
            before = self.files()
            self.expect(run(*command), 3, out, "exists", "--force")
            self.assertEqual(self.files(), before, command)
            self.assertEqual(run(*command, "--force").returncode, 0, command)
            self.assertNotEqual(out.read_bytes(), OLDER, command)
            out.unlink()

    def test_an_input_is_never_written(self):
        link, hard = self.dir / "link.h5", self.dir / "hard.h5"
        link.symlink_to(self.dump.name)
        hard.hardlink_to(self.dump)
        profile = self.dir / "p.h5"
        self.assertEqual(run("calibrate", "--no-thresholds", self.dump, "-o", profile).returncode, 0)
        commands = [("compress", "--preset", "k8v4", self.dump, same) for same in (self.dump, link, hard, self.dir / "." / "in.h5")]
        commands += [("decompress", self.tkv, self.tkv), ("compress", "--preset", "step", "--profile", profile, self.dump, profile),
                     ("calibrate", "--no-thresholds", SAMPLE, self.dump, "-o", link)]
        tensors = self.dir / "tensors.h5"
        tensors.symlink_to(self.st.name)
        commands += [("convert", self.st, tensors)]
        before = self.files()
        for command in commands:
            for force in ((), ("--force",)):
                self.expect(run(*command, *force), 3, "the same file as the input")
                self.assertEqual(self.files(), before, command)

    def test_links_stay_links(self):
        folder, elsewhere = self.dir / "links", self.dir / "elsewhere"
        folder.mkdir(), elsewhere.mkdir()
        for command, out in self.commands(folder):
            target = elsewhere / out.name
            middle = folder / "middle"
            middle.symlink_to("../elsewhere/" + out.name)
            out.symlink_to(middle)
            for force in ((), ("--force",)):  # first to where there is nothing
                self.assertEqual(run(*command, *force).returncode, 0, command)
                self.assertTrue(out.is_symlink() and middle.is_symlink() and target.stat().st_size > len(OLDER), command)
                self.assertEqual([sorted(os.listdir(f)) for f in (folder, elsewhere)], [sorted(["middle", out.name]), [out.name]], command)
                target.write_bytes(OLDER)
            out.unlink(), middle.unlink(), target.unlink()
        out = folder / "loop.tkv"
        out.symlink_to(out.name)
        self.expect(run("compress", "--preset", "k8v4", self.dump, out), 3, out, "cannot be written")
        self.assertTrue(out.is_symlink())

    def test_pipes_and_devices_are_not_replaced(self):
        pipe, full = self.dir / "pipe", self.dir / "full"
        full.symlink_to("/dev/full")
        os.mkfifo(pipe)
        for out in (pipe, full, "/dev/stdout", self.dir):
            for command in (("compress", "--preset", "k8v4", self.dump, out), ("decompress", self.tkv, out),
                            ("calibrate", "--no-thresholds", self.dump, "-o", out), ("synth", "-o", out, "--tokens", 20)):
                for force in ((), ("--force",)):
                    self.expect(run(*command, *force), 3, out, "Is a directory" if out == self.dir else "is not a regular file")
        self.assertTrue(stat.S_ISFIFO(pipe.lstat().st_mode) and full.is_symlink())
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/full").st_mode))


if __name__ == "__main__":
    main()
