# SPDX-License-Identifier: Apache-2.0
"""What tests with random input share: the package's path, fresh numbers and their seed."""
import random
import sys
import unittest

import numpy as np

sys.path.insert(0, sys.argv[1])


class RandomTest(unittest.TestCase):
    def setUp(self):
        self.seed = random.SystemRandom().randrange(2**32)
        self.rng = np.random.default_rng(self.seed)
