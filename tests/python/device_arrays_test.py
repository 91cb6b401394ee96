# SPDX-License-Identifier: Apache-2.0
"""How arrays in GPU memory are read, as far as that needs no GPU."""
import sys
import types
import unittest
from unittest import mock

import numpy as np
from random_case import RandomTest
from tierkv import _device


class FakeTensor:
    """What a torch tensor in GPU memory is to us, in memory of the host."""

    def __init__(self, array, device=2):
        self.array, self.device, self.streams = array, device, []

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.array.__dlpack__()


class FakeInterface:
    def __init__(self, array):
        self.__cuda_array_interface__ = dict(array.__array_interface__, version=3)


class FakeTorch(FakeTensor):
    """With a torch.Tensor's own methods."""

    is_cuda, requires_grad, layout = True, False, "strided"

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return f"torch.{self.array.dtype}"

    def stride(self):
        return [s // self.array.itemsize for s in self.array.strides]

    def data_ptr(self):
        return self.array.ctypes.data


def fake_torch(stream):
    cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=stream))
    return mock.patch.dict(sys.modules, {"torch": types.SimpleNamespace(Tensor=FakeTorch, strided="strided", cuda=cuda)})


class DeviceArrays(RandomTest):
    def test_they_are_taken_where_they_are(self):
        x = self.rng.normal(size=(3, 4, 5)).astype(np.float16)
        tensor = FakeTensor(x)
        for given in (tensor, FakeInterface(x)):
            a = _device.device_array(given, "x", ("float16",), (3, None, 5), 77)
            self.assertEqual((a.address, a.shape, a.dtype), (x.ctypes.data, (3, 4, 5), "float16"))
        _device.device_array(tensor, "x", ("float16",), (3, None, 5), 0)
        self.assertEqual(tensor.streams, [77, 1])

    def test_tensors_of_the_stream_itself_need_no_dlpack(self):
        x = self.rng.normal(size=(3, 4)).astype(np.float16)
        for current, grad, streams in ((77, False, []), (5, False, [77]), (77, True, [77])):
            tensor = FakeTorch(x)
            tensor.requires_grad = grad
            with fake_torch(current):
                a = _device.device_array(tensor, "x", ("float16",), (3, 4), 77)
            self.assertEqual((a.address, a.shape, a.dtype, tensor.streams), (x.ctypes.data, (3, 4), "float16", streams))

    def test_what_is_refused(self):
        x = self.rng.normal(size=(4, 6)).astype(np.float32)
        for kind in (FakeTensor, FakeInterface, FakeTorch):
            for array, error, words in ((x[:, ::2], ValueError, "contiguous"), (x.T, ValueError, "contiguous"),
                                        (x.astype(np.float16), TypeError, "float16 instead of float32"), (x[0], ValueError, "shape"),
                                        (x.astype(np.int32), TypeError, "dtype"), (x.astype(np.float64), TypeError, "dtype")):
                with fake_torch(1), self.assertRaises(error) as caught:
                    _device.device_array(kind(array), "x", ("float32",), (4, None), 1)
                self.assertIn(words, str(caught.exception))
            # A slice that is dense all the same.
            self.assertEqual(_device.device_array(kind(x[1:3]), "x", ("float32",), (2, 6), 1).address, x[1:].ctypes.data)
        for array in (x, FakeTensor(x, device=1), [1.0]):
            with self.assertRaisesRegex(TypeError, "not in GPU memory"):
                _device.device_array(array, "x", ("float32",), (4, 6), 1)

    def test_results_beside_what_is_not_torch_must_be_given(self):
        with self.assertRaisesRegex(TypeError, "into"):
            _device.empty(FakeInterface(np.zeros(3, np.float32)), "float16", (3,))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
