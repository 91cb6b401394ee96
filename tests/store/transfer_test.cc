// Exported sequences: the same state elsewhere, and nothing but that is let in.
#include <gtest/gtest.h>

#include "codec/file/container_format.h"
#include "tests/store/support/modelled_store.h"

namespace tierkv::testing {
namespace {

class StoreTransfer : public ::testing::Test {
 protected:
  StoreTransfer() : world_(small_config(), &input_) {
    EXPECT_TRUE(world_.add(&sequence_));
    EXPECT_TRUE(world_.prompt({&sequence_}, 70, true));
    EXPECT_TRUE(world_.end_prompt({&sequence_}));
    for (int32_t i = 0; i < 9; ++i) EXPECT_TRUE(world_.step({&sequence_}, 1, true));
    bytes_ = *world_.store().export_sequence(sequence_.id);
    // The header ends with its checksum; the first row begins behind it.
    row_ = header_bytes();
  }
  static size_t header_bytes() { return 8 + 6 * 4 + 16 + 3 * 20 + 8 + 8 + 16 + 8; }

  int32_t field(size_t at) const {
    int32_t x;
    std::memcpy(&x, &bytes_[at], 4);
    return x;
  }
  Status import(const std::vector<uint8_t>& bytes) {
    return world_.store().import_sequence(bytes.data(), bytes.size()).status();
  }
  // The first row with the checksum that its bytes have: its own damage is found by looking.
  std::vector<uint8_t> resealed(std::vector<uint8_t> bytes) const {
    const uint64_t sum = xxh3(&bytes[row_], row_bytes());
    std::memcpy(&bytes[row_ + row_bytes()], &sum, 8);
    return bytes;
  }
  size_t row_bytes() const {
    const StoreView& v = world_.view();
    size_t bytes = 12;
    for (int32_t side = 0; side < kStoreSides; ++side) {
      for (int32_t left = field(row_ + 4 * side); left > 0; left -= v.page_tokens(side)) {
        bytes += page_packed(side, std::min(left, v.page_tokens(side)));
      }
    }
    return bytes;
  }
  // Tiles of 16 tokens: codes, metadata, score and position.
  size_t page_packed(int32_t side, int32_t used) const {
    const PageLayout& p = world_.view().layouts[side];
    return (used + 15) / 16 * (static_cast<size_t>(p.used_bytes) / p.tiles());
  }

  RandomInput input_;
  ModelledStore world_;
  ModelSequence sequence_;
  std::vector<uint8_t> bytes_;
  size_t row_ = 0;
};

TEST_F(StoreTransfer, GoesOnElsewhereAsItWouldHaveHere) {
  KvStoreConfig other = small_config();
  other.num_pages = 200;
  other.max_sequences = 2;
  other.max_tokens = 100;
  other.policy.alpha_high = 1.5;
  const auto store = make_store(other);
  const SequenceId first = *store->add_sequence();  // so that slots and pages differ
  ASSERT_TRUE(store->begin_prompt({&first, 1}, 33));
  const auto id = store->import_sequence(bytes_.data(), bytes_.size());
  ASSERT_TRUE(id.is_ok()) << id.status().message();
  EXPECT_TRUE(*store->export_sequence(*id) == bytes_);
  EXPECT_EQ(*store->num_tokens(*id), 79);
  EXPECT_EQ(world_.transfer(sequence_, &sequence_).code(), StatusCode::kOk);
  for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(world_.step({&sequence_}, 1, true));
  EXPECT_EQ(world_.difference(sequence_, true), "");
}

TEST_F(StoreTransfer, RefusesAnyDamage) {
  const std::vector<uint8_t> before = state_of(world_.view());
  for (int32_t i = 0; i < 3000; ++i) {
    std::vector<uint8_t> damaged = bytes_;
    const int32_t last = static_cast<int32_t>(damaged.size()) - 1;
    const int32_t at = input_.chance(0.2) ? input_.uniform(0, 200) : input_.uniform(0, last);
    damaged[at] ^= static_cast<uint8_t>(1 << input_.uniform(0, 7));
    ASSERT_FALSE(import(damaged)) << "byte " << at;
  }
  for (int32_t i = 0; i < 300; ++i) {
    std::vector<uint8_t> cut = bytes_;
    cut.resize(input_.uniform(0, static_cast<int32_t>(bytes_.size()) - 1));
    ASSERT_EQ(import(cut).code(), StatusCode::kCorrupt);
  }
  std::vector<uint8_t> longer = bytes_;
  longer.push_back(0);
  EXPECT_EQ(import(longer).code(), StatusCode::kCorrupt);
  EXPECT_EQ(world_.store().import_sequence(nullptr, 10).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_TRUE(state_of(world_.view()) == before);
}

TEST_F(StoreTransfer, RefusesAnotherVersionAndAnotherConfig) {
  std::vector<uint8_t> newer = bytes_;
  newer[4] = 3;
  EXPECT_EQ(import(newer).code(), StatusCode::kVersion);
  for (const auto change : {+[](KvStoreConfig* c) { c->policy.sink_tokens = 2; },
                            +[](KvStoreConfig* c) { c->low_format = token_wise_tier(4, 4); },
                            +[](KvStoreConfig* c) { c->layout.num_layers = 1; },
                            +[](KvStoreConfig* c) { c->page_bytes = 4096; }}) {
    KvStoreConfig c = small_config();
    change(&c);
    const auto store = make_store(c);
    EXPECT_EQ(store->import_sequence(bytes_.data(), bytes_.size()).status().code(),
              StatusCode::kInvalidArgument);
  }
  KvStoreConfig shorter = small_config();
  shorter.max_tokens = 78;
  EXPECT_EQ(make_store(shorter)->import_sequence(bytes_.data(), bytes_.size()).status().code(),
            StatusCode::kOutOfRange);
  KvStoreConfig smaller = small_config();
  smaller.num_pages = 8;
  EXPECT_EQ(make_store(smaller)->import_sequence(bytes_.data(), bytes_.size()).status().code(),
            StatusCode::kOutOfPages);
}

// Damage that the checksum agrees with: what is let in must be a state the store can live with.
TEST_F(StoreTransfer, LooksAtEveryTokenOfAResealedRow) {
  ASSERT_TRUE(import(resealed(bytes_))) << "the test seals as the store does";
  const PageLayout& high = world_.view().layouts[kHighSide];
  const int32_t used = std::min(field(row_), high.tokens);
  ASSERT_GT(used, 1);
  const int32_t tiles = (used + 15) / 16;
  const size_t page = row_ + 12, positions = page + page_packed(kHighSide, used) - tiles * 64;
  const size_t scores = positions - tiles * 64, metadata = page + tiles * high.k_tile.bytes();
  const auto with = [&](size_t at, uint32_t bits, size_t width) {
    std::vector<uint8_t> bytes = bytes_;
    std::memcpy(&bytes[at], &bits, width);
    return import(resealed(std::move(bytes))).code();
  };
  EXPECT_EQ(with(scores, 0x7fc00000, 4), StatusCode::kCorrupt);
  EXPECT_EQ(with(scores, 0xbf800000, 4), StatusCode::kCorrupt);
  EXPECT_EQ(with(scores, 0xff800000, 4), StatusCode::kCorrupt);
  EXPECT_EQ(with(positions, 75, 4), StatusCode::kCorrupt) << "a position of the window";
  EXPECT_EQ(with(positions, 0xffffffff, 4), StatusCode::kCorrupt);
  EXPECT_EQ(with(positions, static_cast<uint32_t>(field(positions + 4)), 4), StatusCode::kCorrupt);
  EXPECT_EQ(with(metadata, 0x7c00, 2), StatusCode::kCorrupt) << "an infinite scale";
  EXPECT_EQ(with(metadata, 0x8400, 2), StatusCode::kCorrupt) << "a negative scale";
  EXPECT_EQ(with(metadata, 0x7bff7bff, 4), StatusCode::kCorrupt) << "values beyond fp16";
  EXPECT_EQ(with(metadata + 2, 0x7e00, 2), StatusCode::kCorrupt);
  EXPECT_EQ(with(row_, static_cast<uint32_t>(INT32_MAX), 4), StatusCode::kCorrupt);
  EXPECT_EQ(with(row_, 0xffffffff, 4), StatusCode::kCorrupt);
}

}  // namespace
}  // namespace tierkv::testing
