# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a padded batch the sequences of a store hold."""
import sys
import unittest

import numpy as np

sys.path.insert(0, sys.argv.pop(1))
from tierkv._hf_batch import Batch, Moves, PaddingError, groups  # noqa: E402


class Rows(unittest.TestCase):
    def test_without_padding_every_position_is_a_token(self):
        batch = Batch()
        self.assertEqual(batch.extend(3, 5, None), [5, 5, 5])
        self.assertEqual(batch.extend(3, 1, None), [1, 1, 1])
        self.assertEqual((batch.length, batch.tokens()), (6, [6, 6, 6]))

    def test_padding_on_the_left_holds_no_tokens(self):
        batch = Batch()
        mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
        self.assertEqual(batch.extend(3, 4, mask), [2, 4, 1])
        self.assertEqual(batch.extend(3, 1, np.c_[mask, [1, 1, 1]]), [1, 1, 1])
        self.assertEqual(batch.tokens(), [3, 5, 2])
        # A mask is left out where all are visible from here on.
        self.assertEqual(batch.extend(3, 2, None), [2, 2, 2])
        self.assertEqual(batch.tokens(), [5, 7, 4])

    def test_other_masks_are_refused_and_change_nothing(self):
        batch = Batch()
        batch.extend(2, 3, np.array([[0, 1, 1], [1, 1, 1]]))
        for mask, reason in (([[0, 1, 1, 0], [1, 1, 1, 1]], "row 0 is not padded on the left"),
                             ([[0, 1, 1, 1], [1, 0, 1, 1]], "row 1 is not padded on the left"),
                             ([[0, 0, 0, 0], [1, 1, 1, 1]], "in the cache already"),
                             ([[0, 0, 1, 1], [1, 1, 1, 1]], "in the cache already"),
                             ([[1, 1, 1, 1], [1, 1, 1, 1]], "in the cache already"),
                             ([[0, 1, 1], [1, 1, 1]], "shape")):
            with self.assertRaisesRegex(PaddingError, reason):
                batch.extend(2, 1, np.array(mask))
            self.assertEqual((batch.length, batch.tokens()), (3, [2, 3]))
        with self.assertRaises(ValueError):
            batch.extend(3, 1, None)

    def test_crop_counts_padding(self):
        batch = Batch()
        batch.extend(2, 6, np.array([[0, 0, 1, 1, 1, 1], [1] * 6]))
        self.assertEqual(batch.tokens(4), [2, 4])
        self.assertEqual(batch.tokens(), [4, 6])
        batch.crop(1)
        self.assertEqual(batch.tokens(), [0, 1])
        for length in (-1, 2):
            with self.assertRaises(ValueError):
                batch.crop(length)

    def test_rows_are_chosen(self):
        batch = Batch()
        batch.extend(3, 3, np.array([[0, 0, 1], [0, 1, 1], [1, 1, 1]]))
        batch.select([2, 2, 0])
        self.assertEqual(batch.tokens(), [3, 3, 1])


class Beams(unittest.TestCase):
    def test_the_first_keeps_others_fork(self):
        moves = Moves([1, 1, 3, 1], 4)
        self.assertEqual((moves.forked, moves.dropped), ([False, True, False, True], [0, 2]))

    def test_staying_forks_nothing(self):
        moves = Moves([0, 1], 2)
        self.assertEqual((moves.forked, moves.dropped), ([False, False], []))

    def test_rows_that_are_not_there(self):
        for chosen in ([2], [-1]):
            with self.assertRaises(ValueError):
                Moves(chosen, 2)


class Groups(unittest.TestCase):
    def test_equal_counts_go_together(self):
        self.assertEqual(groups([3, 1, 3, 0, 1]), [[0, 2], [1, 4]])
        self.assertEqual(groups([]), [])


if __name__ == "__main__":
    unittest.main()
