// SPDX-License-Identifier: Apache-2.0
// The rules of the C ABI: struct sizes of other versions, null pointers, error texts.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "tests/support/c_structs.h"

namespace tierkv::test {
namespace {

TEST(CapiStatus, NamesEveryCodeAndTheVersion) {
  EXPECT_STREQ(tkv_status_string(TKV_OK), "ok");
  EXPECT_STREQ(tkv_status_string(TKV_CORRUPT), "corrupt");
  EXPECT_STREQ(tkv_status_string(TKV_OUT_OF_MEMORY), "out_of_memory");
  EXPECT_STREQ(tkv_status_string(TKV_INTERNAL), "internal");
  for (const tkv_status unknown : {-1, 14, 99, 100, 102, 1 << 30}) {
    EXPECT_STREQ(tkv_status_string(unknown), "unknown");
  }
  EXPECT_EQ(std::string(tkv_version()), std::to_string(TKV_VERSION_MAJOR) + "." +
                                            std::to_string(TKV_VERSION_MINOR) + "." +
                                            std::to_string(TKV_VERSION_PATCH));
}

TEST(CapiStatus, EveryFunctionAcceptsNullPointersAndANullError) {
  EXPECT_EQ(tkv_page_choose_size(nullptr, 0, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_page_tokens(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_page_encode(nullptr, nullptr, 0, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_page_decode(nullptr, nullptr, 0, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_quantize(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_dequantize(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_codebook_build(nullptr, nullptr, 0, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_codebook_parse(nullptr, 0, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_codebook_serialize(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_block_encode(nullptr, nullptr, nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_block_decode(nullptr, nullptr, nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_container_open(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_container_open_bytes(nullptr, 0, nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_container_get_info(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_container_get_sequence(nullptr, 0, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_container_decode_layer(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_container_verify(nullptr, 0, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_attention_validate(nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_attention_create(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_attention_workspace_bytes(nullptr, 1, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_plan_attention(nullptr, nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_attend(nullptr, nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_attention_row_status(nullptr, nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_merge_attention(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_merge_attention_host(nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_analyze(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_calibrate(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_compress(nullptr, nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_decompress(nullptr, nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  tkv_codebook_destroy(nullptr);
  tkv_container_destroy(nullptr);
  EXPECT_EQ(tkv_profile_open(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_profile_get_data(nullptr, nullptr, nullptr), TKV_INVALID_ARGUMENT);
  tkv_profile_destroy(nullptr);
  tkv_attention_destroy(nullptr);
  tkv_text_destroy(nullptr);
  EXPECT_STREQ(tkv_text_data(nullptr), "");
}

TEST(CapiStatus, AStructOfALaterVersionIsReadWhereItsNewFieldsAreZero) {
  struct {
    tkv_page_format format;
    int64_t new_field = 0;
  } later;
  later.format = make<tkv_page_format>();
  later.format.struct_size = sizeof later;
  later.format.head_dim = 128;
  later.format.k_bits = 8;
  later.format.v_bits = 4;
  later.format.page_bytes = 13312;
  int32_t tokens = -1;
  tkv_error error = make<tkv_error>();
  EXPECT_EQ(tkv_page_tokens(&later.format, &tokens, &error), TKV_OK) << error.message;
  EXPECT_EQ(tokens, 64);
  later.new_field = 1;
  tokens = -1;
  EXPECT_EQ(tkv_page_tokens(&later.format, &tokens, &error), TKV_UNSUPPORTED);
  EXPECT_NE(std::strstr(error.message, "newer"), nullptr) << error.message;
  EXPECT_EQ(tokens, -1);
}

TEST(CapiStatus, AStructOfAnEarlierVersionLacksFieldsThatAreThenZero) {
  // A version without raw_dtype; what lies behind the struct must be neither read nor written.
  tkv_page_format format = make<tkv_page_format>();
  format.struct_size = offsetof(tkv_page_format, raw_dtype);
  format.head_dim = 64;
  format.k_bits = 16;
  format.v_bits = 16;
  format.page_bytes = 8192;
  format.raw_dtype = 77;
  int32_t tokens = -1;
  EXPECT_EQ(tkv_page_tokens(&format, &tokens, nullptr), TKV_OK);
  format.struct_size = sizeof format;
  EXPECT_EQ(tkv_page_tokens(&format, &tokens, nullptr), TKV_INVALID_ARGUMENT);

  tkv_page_choice choice = make<tkv_page_choice>();
  choice.struct_size = offsetof(tkv_page_choice, worst_waste);
  choice.worst_waste = -5;
  choice.within_limit = -5;
  format.raw_dtype = TKV_FLOAT16;
  EXPECT_EQ(tkv_page_choose_size(&format, 1, &choice, nullptr), TKV_OK);
  EXPECT_GT(choice.page_bytes, 0);
  EXPECT_EQ(choice.worst_waste, -5);
  EXPECT_EQ(choice.within_limit, -5);
}

TEST(CapiStatus, AStructWithoutASizeIsRefused) {
  tkv_page_format format = make<tkv_page_format>();
  int32_t tokens = 0;
  for (const size_t size : {size_t{0}, size_t{7}, SIZE_MAX}) {
    format.struct_size = size;
    tkv_error error = make<tkv_error>();
    EXPECT_EQ(tkv_page_tokens(&format, &tokens, &error), TKV_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(error.message, "struct_size"), nullptr) << error.message;
  }
}

TEST(CapiStatus, MessagesAreCutToTheErrorTheyAreWrittenTo) {
  const std::string path = "/nowhere/\xc3\xa4" + std::string(600, 'x');
  for (size_t room = 0; room <= 32; ++room) {
    tkv_error error = make<tkv_error>();
    std::memset(error.message, 0x5a, sizeof error.message);
    error.struct_size = offsetof(tkv_error, message) + room;
    tkv_container* container = nullptr;
    EXPECT_EQ(tkv_container_open(path.c_str(), &container, &error), TKV_IO);
    EXPECT_EQ(container, nullptr);
    EXPECT_EQ(error.message[room], 0x5a) << "wrote behind struct_size";
    if (room == 0) continue;
    const size_t length = strnlen(error.message, room);
    ASSERT_LT(length, room);
    // The umlaut is never cut in half.
    EXPECT_NE(static_cast<unsigned char>(error.message[length > 0 ? length - 1 : 0]), 0xc3);
  }
}

TEST(CapiStatus, AMessageDoesNotOutliveTheNextCall) {
  tkv_error error = make<tkv_error>();
  tkv_container* container = nullptr;
  EXPECT_EQ(tkv_container_open("/nowhere", &container, &error), TKV_IO);
  EXPECT_STRNE(error.message, "");
  tkv_page_format format = make<tkv_page_format>();
  format.head_dim = 128;
  format.k_bits = format.v_bits = 4;
  format.page_bytes = 16384;
  int32_t tokens = 0;
  EXPECT_EQ(tkv_page_tokens(&format, &tokens, &error), TKV_OK);
  EXPECT_STREQ(error.message, "");
}

}  // namespace
}  // namespace tierkv::test
