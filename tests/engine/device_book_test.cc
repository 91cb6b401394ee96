// SPDX-License-Identifier: Apache-2.0
// What the host remembers of a device that it does not wait for.
#include <gtest/gtest.h>

#include "store/place/device/batch_book.h"

namespace tierkv::store {
namespace {

uint64_t word(int64_t free, uint32_t next) {
  return static_cast<uint64_t>(free) << 32 | next;
}

TEST(FreePagesTest, AssumesTheWorstOfWhatHasNotFinished) {
  uint64_t published = word(100, 1);
  FreePages pages;
  pages.set(&published);
  EXPECT_EQ(pages.at_least(), 100);
  pages.enqueue(30);  // operation 1
  pages.enqueue(20);  // operation 2
  EXPECT_EQ(pages.at_least(), 50);
  published = word(90, 2);  // the first took 10
  EXPECT_EQ(pages.at_least(), 70);
  pages.enqueue(5);
  EXPECT_EQ(pages.at_least(), 65);
  published = word(88, 4);
  EXPECT_EQ(pages.at_least(), 88);
}

TEST(FreePagesTest, ForgetsWhatNeverRan) {
  uint64_t published = word(100, 1);
  FreePages pages;
  pages.set(&published);
  pages.enqueue(10);  // operation 1
  pages.enqueue(50);  // captured, and given up
  published = word(90, 2);
  EXPECT_EQ(pages.at_least(), 40);
  pages.settle();
  EXPECT_EQ(pages.at_least(), 90);
  pages.enqueue(5);  // operation 2
  EXPECT_EQ(pages.at_least(), 85);
  published = word(88, 3);
  EXPECT_EQ(pages.at_least(), 88);
}

TEST(FreePagesTest, NumbersTurnOver) {
  uint64_t published = word(1000, 1);
  FreePages pages;
  pages.set(&published);
  for (uint32_t i = 1; i != 0 && i < 3000; ++i) pages.enqueue(0);
  published = word(1000, 2990);
  pages.enqueue(7);  // operation 3000
  EXPECT_EQ(pages.at_least(), 993);
  published = word(993, 3001);
  EXPECT_EQ(pages.at_least(), 993);
}

TEST(BatchBookTest, KeepsWhatACallWroteForItsSequences) {
  BatchBook book(3);
  book.enter(0);
  const std::vector<int32_t> a = {2, 1}, b = {1, 2};
  EXPECT_FALSE(book.has_at(a, 0));
  book.wrote_step(a, 4);
  EXPECT_TRUE(book.has_step(a, 4));
  EXPECT_FALSE(book.has_step(a, 3));
  EXPECT_FALSE(book.has_step(b, 4));
  EXPECT_TRUE(book.has_at(a, 2));
  book.wrote_layer(a, 1);  // from and to are those of one layer now
  EXPECT_FALSE(book.has_step(a, 4));
  EXPECT_TRUE(book.has_at(a, 0));
  book.wrote_layer(b, 1);
  EXPECT_TRUE(book.has_at(b, 1));
  EXPECT_FALSE(book.has_at(b, 0));
  book.wrote_held(b);
  EXPECT_TRUE(book.has_at(b, 0));
  EXPECT_FALSE(book.plan(1, {64, 0}));
  EXPECT_TRUE(book.plan(1, {64, 0}));
  EXPECT_FALSE(book.plan(2, {64, 0}));
  EXPECT_FALSE(book.plan(2, {64, 64}));
  book.wrote_step(b, 1);
  EXPECT_FALSE(book.plan(2, {64, 64}));
  book.forget();
  EXPECT_FALSE(book.has_at(b, 0));
}

TEST(BatchBookTest, ACaptureHasAMemoryOfItsOwn) {
  BatchBook book(2);
  const std::vector<int32_t> a = {0};
  book.enter(0);
  book.wrote_held(a);
  book.enter(7);
  EXPECT_TRUE(book.is_captured());
  EXPECT_FALSE(book.has_at(a, 0));
  book.wrote_step(a, 1);
  book.enter(0);
  EXPECT_FALSE(book.has_at(a, 0));  // the capture will move the counts
  book.enter(7);
  EXPECT_TRUE(book.has_step(a, 1));
  book.enter(8);
  EXPECT_FALSE(book.has_step(a, 1));
}

}  // namespace
}  // namespace tierkv::store
