#include "arithmetic/dequantized_reader.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string_view>
#include <tuple>

#include "arithmetic/model_config.h"
#include "base/json.h"
#include "support/error_matchers.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/merge.h"

namespace tessera::arithmetic {
namespace {

using test::MemoryCheckpoint;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

std::string folder() {
  return test::fixture("arithmetic/quantized/");
}

DequantizedCheckpoint dequantized(const std::string& name, DType to) {
  const FileSystem& fs = FileSystem::posix();
  return dequantize(formats::open_checkpoint(fs, folder() + name), to,
                    {read_model_config(fs, folder() + name)}, {}, reshard::OnOverflow::refuse);
}

class DequantizedTest : public testing::TestWithParam<const char*> {};

TEST_P(DequantizedTest, EveryWindowHasTheNumbersOfTheLibraries) {
  const std::string name = GetParam();
  const auto numbers =
      formats::open_checkpoint(FileSystem::posix(), folder() + name + ".numbers.safetensors");
  for (const formats::TensorEntry& tensor : numbers->contents().tensors) {
    const auto result = dequantized(name, tensor.meta.dtype);
    ASSERT_THAT(result.problems, IsEmpty());
    const auto& tensors = result.reader->contents().tensors;
    const formats::TensorEntry* const found =
        result.reader->contents().find_tensor(tensor.meta.fqn);
    ASSERT_NE(found, nullptr);
    if (found->meta != tensor.meta) continue;  // another tensor, in another dtype
    const auto index = static_cast<std::size_t>(found - tensors.data());
    const test::Bytes expected = test::whole_tensor(
        *numbers, static_cast<std::size_t>(&tensor - numbers->contents().tensors.data()));
    const auto size = static_cast<std::int64_t>(itemsize(tensor.meta.dtype));
    const std::int64_t step = std::max<std::int64_t>(3, tensor.meta.numel() / 17);
    for (std::int64_t begin = 0; begin <= tensor.meta.numel(); begin += step) {
      for (std::int64_t end = begin; end <= tensor.meta.numel(); end += step - 1) {
        std::vector<std::byte> window(static_cast<std::size_t>((end - begin) * size));
        result.reader->read_piece(index, 0, {begin, end}, window);
        ASSERT_TRUE(std::ranges::equal(
            window,
            std::span(expected).subspan(static_cast<std::size_t>(begin * size), window.size())))
            << tensor.meta.fqn << " " << begin << " " << end;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, DequantizedTest,
                         testing::Values("awq", "fp8_blocks", "fp8_channels", "fp8_groups",
                                         "fp8_tensor", "gptq", "gptq_ordered", "int3_channels",
                                         "int4_groups", "int4_zeros", "int8_channels",
                                         "int8_packed", "mxfp4_experts", "mxfp4_groups",
                                         "mxfp8_groups", "nvfp4"),
                         [](const auto& each) { return std::string(each.param); });

TEST(DequantizeTest, WithoutQuantizedWeightsTheSourceStaysAsItIs) {
  auto source = std::make_unique<MemoryCheckpoint>();
  source->add({"w", DType::float32, {1}}, test::bytes_of<float>({1}));
  const auto* const before = source.get();
  const auto result =
      dequantize(std::move(source), DType::bfloat16, {}, {}, reshard::OnOverflow::refuse);
  EXPECT_EQ(result.reader.get(), before);
  EXPECT_EQ(result.num_weights, 0);
}

TEST(DequantizeTest, TextsThatDescribeCodesAreRemovedWithANote) {
  using Texts = std::map<std::string, std::string>;
  const auto numbers_beside = [](const Texts& texts) {
    auto checkpoint = std::make_unique<MemoryCheckpoint>();
    checkpoint->add({"w.weight", DType::float8_e4m3fn, {2}}, test::Bytes(2, std::byte{0x38}));
    checkpoint->add({"w.weight_scale", DType::float32, {1}}, test::bytes_of<float>({1}));
    checkpoint->contents_for_change().annotations = texts;
    return dequantize(std::move(checkpoint), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  };
  const std::string config = R"({"quantization_config": {"quant_method": "fp8"}, "layers": 2})";
  const auto both = numbers_beside({{"config", config}, {"quantization_config", "{}"}, {"a", "b"}});
  ASSERT_THAT(both.problems, IsEmpty());
  EXPECT_EQ(both.reader->contents().annotations,
            (Texts{{"a", "b"}, {"config", R"({ "layers": 2})"}}));
  const auto& notes = both.reader->contents().opening_findings;
  ASSERT_THAT(notes, SizeIs(1));
  EXPECT_EQ(notes[0].found,
            "settings of the quantization (removed): 'quantization_config', "
            "'config.quantization_config'");
  const Texts others{{"config", "no JSON"}};
  const auto none = numbers_beside(others);
  EXPECT_EQ(none.reader->contents().annotations, others);
  EXPECT_THAT(none.reader->contents().opening_findings, IsEmpty());
}

TEST(DequantizeTest, EveryMatrixOfAStackHasItsOwnScales) {
  auto source = std::make_unique<MemoryCheckpoint>();
  source->add({"w", DType::int8, {2, 2, 3}},
              test::bytes_of<std::int8_t>({1, 2, 3, 4, 5, 6, -1, -2, -3, -4, -5, -6}),
              {{Box{{0, 0, 1}, {2, 2, 2}}, 0}, {Box{{0, 0, 0}, {2, 2, 1}}, 1}});
  source->add({"w_scale", DType::float32, {2, 2, 1}}, test::bytes_of<float>({1, 10, 100, 1000}));
  const auto result =
      dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(test::whole_tensor(*result.reader, 0),
            test::bytes_of<float>({1, 2, 3, 40, 50, 60, -100, -200, -300, -4000, -5000, -6000}));
}

TEST(DequantizeTest, ATransposedWeightMayBeLargerThanATile) {
  constexpr std::int64_t kRows = 3000;
  constexpr std::int64_t kGroups = 180;
  constexpr std::int64_t kColumns = kGroups * 32;
  const auto code = [](std::int64_t row, std::int64_t column) {
    return static_cast<unsigned>((row * 5 + column * 3) % 8);
  };
  test::Bytes blocks;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t column = 0; column < kColumns; column += 2) {
      blocks.push_back(static_cast<std::byte>(code(row, column) | code(row, column + 1) << 4));
    }
  }
  auto source = std::make_unique<MemoryCheckpoint>();
  source->add({"w_blocks", DType::uint8, {kRows, kGroups, 16}}, blocks);
  source->add({"w_scales", DType::uint8, {kRows, kGroups}},
              test::Bytes(kRows * kGroups, std::byte{127}));
  const auto result =
      dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  ASSERT_THAT(result.problems, IsEmpty());
  ASSERT_EQ(result.reader->contents().tensors[0].meta.shape, (Shape{kColumns, kRows}));
  constexpr std::array<float, 8> kNumbers = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{8'388'600},
                                   std::int64_t{16'777'210}, kRows * kColumns - 20}) {
    std::array<float, 20> numbers{};
    result.reader->read_piece(0, 0, {begin, begin + 20},
                              std::as_writable_bytes(std::span(numbers)));
    for (std::int64_t i = 0; i < 20; ++i) {
      const std::int64_t at = begin + i;
      EXPECT_EQ(numbers[static_cast<std::size_t>(i)], kNumbers[code(at % kRows, at / kRows)]) << at;
    }
  }
}

/// A weight of int8 with one scale for each row.
DequantizedCheckpoint scaled(std::vector<std::int8_t> codes, std::vector<float> scales, DType to,
                             reshard::OnOverflow on_overflow) {
  auto source = std::make_unique<MemoryCheckpoint>();
  const auto num_rows = static_cast<std::int64_t>(scales.size());
  source->add({"w", DType::int8, {num_rows, static_cast<std::int64_t>(codes.size()) / num_rows}},
              test::bytes_of<std::int8_t>(codes));
  source->add({"w_scale", DType::float32, {num_rows, 1}}, test::bytes_of<float>(scales));
  return dequantize(std::move(source), to, {}, {}, on_overflow);
}

TEST(DequantizeTest, AnInfiniteProductOfFiniteNumbersCountsAsTooLarge) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr double kLargest = std::numeric_limits<double>::max();
  const std::vector<std::int8_t> codes{1, -2, 1, -1};
  const std::vector<float> scales{3e38F, kInfinity};
  const auto refused = scaled(codes, scales, DType::float64, reshard::OnOverflow::refuse);
  EXPECT_THAT([&] { test::whole_tensor(*refused.reader, 0); },
              test::ThrowsError(ErrorKind::mismatch, "w: cast: expected finite numbers"));
  const auto saturated = scaled(codes, scales, DType::float64, reshard::OnOverflow::saturate);
  EXPECT_EQ(test::whole_tensor(*saturated.reader, 0),
            test::bytes_of<double>({3e38F, -kLargest, kInfinity, -kInfinity}));
  const auto infinite = scaled(codes, scales, DType::float64, reshard::OnOverflow::infinity);
  EXPECT_EQ(test::whole_tensor(*infinite.reader, 0),
            test::bytes_of<double>({3e38F, -kInfinity, kInfinity, -kInfinity}));
}

TEST(DequantizeTest, CountsTheWeightsThatAreSelected) {
  const FileSystem& fs = FileSystem::posix();
  const auto counted = [&](const char* pattern) {
    const auto result =
        dequantize(formats::open_checkpoint(fs, folder() + "int4_groups"), DType::bfloat16,
                   {read_model_config(fs, folder() + "int4_groups")}, NameSelection({pattern}),
                   reshard::OnOverflow::refuse);
    EXPECT_TRUE(result.has_weights);
    return std::pair(result.num_weights, result.num_companions);
  };
  EXPECT_EQ(counted("*").first, 1);
  EXPECT_EQ(counted("*").second, 2);
  EXPECT_EQ(counted("*weight"), counted("*"));  // the name of the numbers
  EXPECT_EQ(counted("!*weight"), std::pair(std::size_t{0}, std::size_t{0}));
}

/// A weight `w` in mxfp4, tied to `tied`, beside a plain tensor `v` that is tied to `tied-v`.
std::unique_ptr<MemoryCheckpoint> with_tied_codes() {
  auto source = std::make_unique<MemoryCheckpoint>();
  source->add({"v", DType::float32, {1}}, test::bytes_of<float>({1}));
  source->add({"w_blocks", DType::uint8, {1, 1, 16}}, test::Bytes(16, std::byte{0x12}));
  source->add({"w_scales", DType::uint8, {1, 1}}, test::Bytes(1, std::byte{127}));
  source->add_alias("tied-v", "v");
  source->add_alias("tied_blocks", "w_blocks");
  source->add_alias("tied_scales", "w_scales");
  source->contents_for_change().aliases[1].key_path = formats::KeyPath{"tied_blocks"};
  return source;
}

TEST(DequantizeTest, TiedCodesGetTheNameOfAWeight) {
  const auto result =
      dequantize(with_tied_codes(), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  ASSERT_THAT(result.problems, IsEmpty());
  const auto& aliases = result.reader->contents().aliases;
  ASSERT_THAT(aliases, SizeIs(2));
  EXPECT_EQ(aliases[0].fqn, "tied");
  EXPECT_EQ(aliases[0].target, "w");
  EXPECT_THAT(aliases[0].key_path, testing::ElementsAre(formats::Key("tied")));
  EXPECT_EQ(aliases[1].fqn, "tied-v");
  EXPECT_EQ(aliases[1].target, "v");
}

TEST(DequantizeTest, TiedCodesDoNotTakeTheNameOfAnotherTensor) {
  const auto read = [] {
    auto source = with_tied_codes();
    source->add({"tied", DType::float32, {1}}, test::bytes_of<float>({1}));
    dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  };
  EXPECT_THAT(read, test::ThrowsError(ErrorKind::mismatch,
                                      "tied: dequantize: expected one tensor of this name"));
}

TEST(DequantizeTest, AGlobalScaleOfZeroCountsAsTooLarge) {
  auto source = std::make_unique<MemoryCheckpoint>();
  source->add({"w_packed", DType::uint8, {1, 8}}, test::Bytes(8, std::byte{0x12}));
  source->add({"w_scale", DType::float8_e4m3fn, {1, 1}}, test::Bytes(1, std::byte{0x38}));
  source->add({"w_global_scale", DType::float32, {1}}, test::bytes_of<float>({0}));
  const auto result =
      dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  ASSERT_THAT(result.problems, IsEmpty());
  ASSERT_EQ(result.num_weights, 1);
  EXPECT_THAT([&] { test::whole_tensor(*result.reader, 0); },
              test::ThrowsError(ErrorKind::mismatch, "w: cast: expected finite numbers"));
}

TEST(DequantizeTest, BitsOfTheConfigurationMustBeThoseOfTheCodes) {
  const FileSystem& fs = FileSystem::posix();
  for (const std::string bits : {"8", "0", "-4", "4"}) {
    const Value config =
        parse_json(R"({"quantization_config": {"quant_method": "gptq", "bits": )" + bits + "}}",
                   "config.json");
    const auto result = dequantize(formats::open_checkpoint(fs, folder() + "gptq"), DType::float16,
                                   {config}, {}, reshard::OnOverflow::refuse);
    EXPECT_EQ(result.problems.empty(), bits == "4") << bits;
  }
}

TEST(DequantizeTest, OfSeveralBitsThatFitTheCodesNoneIsTaken) {
  const auto read = [](const std::string& bits) {
    auto source = std::make_unique<MemoryCheckpoint>();
    source->add({"w_packed", DType::int32, {1, 1}}, test::bytes_of<std::int32_t>({0x04030201}));
    source->add({"w_scale", DType::float32, {1, 1}}, test::bytes_of<float>({1}));
    source->add({"w_shape", DType::int64, {2}}, test::bytes_of<std::int64_t>({1, 4}));
    const Value config =
        parse_json(R"({"quantization_config": {"config_groups": {)" + bits + "}}}", "config.json");
    return dequantize(std::move(source), DType::float32, {config}, {}, reshard::OnOverflow::refuse);
  };
  const std::string four = R"("a": {"weights": {"num_bits": 4}})";
  const std::string eight = R"("b": {"weights": {"num_bits": 8}})";
  EXPECT_THAT(read(four).problems, IsEmpty());
  EXPECT_THAT(read(eight).problems, IsEmpty());
  const auto both = read(four + ", " + eight);
  ASSERT_THAT(both.problems, SizeIs(1));
  EXPECT_EQ(both.problems[0].found, "4, 8");
}

TEST(DequantizeTest, FlatUnitsOfCodesAreLeftOutWithANote) {
  auto source = with_tied_codes();
  source->contents_for_change().units = {
      make_flat_unit("a", DType::float32, {{"v", {1}}}),
      make_flat_unit("b", DType::uint8, {{"w_blocks", {1, 1, 16}}})};
  const auto result =
      dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  const auto& contents = result.reader->contents();
  ASSERT_THAT(contents.units, SizeIs(1));
  EXPECT_EQ(contents.units[0].name, "a");
  ASSERT_THAT(contents.opening_findings, SizeIs(1));
  EXPECT_THAT(contents.opening_findings[0].found, testing::HasSubstr("1 flat unit ('b')"));
}

TEST(DequantizeTest, BlocksMayBeMuchLargerThanTheWeight) {
  const auto read = [](const std::string& rows, const std::string& columns) {
    auto source = std::make_unique<MemoryCheckpoint>();
    source->add({"w", DType::int8, {2, 4}}, test::bytes_of<std::int8_t>({1, 2, 3, 4, 5, 6, 7, 8}));
    source->add({"w_scale", DType::float32, {1, 2}}, test::bytes_of<float>({1, 10}));
    const Value config = parse_json(
        R"({"quantization_config": {"weight_block_size": [)" + rows + ", " + columns + "]}}", "c");
    return dequantize(std::move(source), DType::float32, {config}, {}, reshard::OnOverflow::refuse);
  };
  const auto result = read("9223372036854775807", "2");
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(test::whole_tensor(*result.reader, 0),
            test::bytes_of<float>({1, 2, 30, 40, 5, 6, 70, 80}));
  EXPECT_THAT(read("4611686018427387904", "4611686018427387904").problems, SizeIs(1));
}

TEST(DequantizeTest, BlocksOfModelOptHave128RowsAndColumns) {
  const auto read = [](const std::string& algorithm) {
    auto source = std::make_unique<MemoryCheckpoint>();
    source->add({"w", DType::int8, {129, 130}},
                test::bytes_of<std::int8_t>(std::vector<std::int8_t>(129 * 130, 1)));
    source->add({"w_scale", DType::float32, {2, 1, 2, 1}}, test::bytes_of<float>({1, 2, 3, 4}));
    const Value config =
        parse_json(R"({"quantization_config": {"quant_method": "modelopt", "quant_algo": ")" +
                       algorithm + R"("}})",
                   "c");
    return dequantize(std::move(source), DType::float32, {config}, {}, reshard::OnOverflow::refuse);
  };
  const auto result = read("fp8_pb_wo");
  ASSERT_THAT(result.problems, IsEmpty());
  std::vector<float> expected;
  for (int row = 0; row < 129; ++row) {
    for (int column = 0; column < 130; ++column) {
      expected.push_back(1.0F + (row < 128 ? 0.0F : 2.0F) + (column < 128 ? 0.0F : 1.0F));
    }
  }
  EXPECT_EQ(test::whole_tensor(*result.reader, 0), test::bytes_of<float>(expected));
  EXPECT_THAT(read("FP8").problems, SizeIs(1));
}

TEST(DequantizeTest, ShapesFromDiskAreChecked) {
  const auto problems_of = [](Shape codes, Shape scales) {
    auto source = std::make_unique<MemoryCheckpoint>();
    source->add({"w", DType::float8_e4m3fn, codes},
                test::Bytes(static_cast<std::size_t>(numel_of(codes))));
    source->add({"w_scale_inv", DType::float32, scales},
                test::Bytes(static_cast<std::size_t>(numel_of(scales)) * 4));
    const Value config =
        parse_json(R"({"quantization_config": {"weight_block_size": [2, 2]}})", "config.json");
    return dequantize(std::move(source), DType::bfloat16, {config}, {}, reshard::OnOverflow::refuse)
        .problems;
  };
  EXPECT_THAT(problems_of({4, 6}, {4, 1}), IsEmpty());
  EXPECT_THAT(problems_of({4, 6}, {2, 3}), IsEmpty());
  EXPECT_THAT(problems_of({4, 6}, {2, 1, 3, 1}), IsEmpty());
  EXPECT_THAT(problems_of({4, 6}, {2, 3, 1, 1}), SizeIs(1));
  EXPECT_THAT(problems_of({4, 6}, {2, 2}), SizeIs(1));  // blocks of 2 x 3
  EXPECT_THAT(problems_of({4, 6}, {3, 3}), SizeIs(1));
  EXPECT_THAT(problems_of({4, 6}, {0, 3}), SizeIs(1));
  EXPECT_THAT(problems_of({4, 6}, {5}), SizeIs(1));
  EXPECT_THAT(problems_of({0, 6}, {0, 3}), SizeIs(1));
  EXPECT_THAT(problems_of({}, {}), SizeIs(1));
}

/// A weight with a scale.
std::unique_ptr<MemoryCheckpoint> scaled_weight(float scale) {
  auto source = std::make_unique<MemoryCheckpoint>();
  source->add({"a.weight", DType::float8_e4m3fn, {2, 2}},
              test::bytes_of<std::uint8_t>({0x38, 0x38, 0x38, 0x38}));
  source->add({"a.weight_scale", DType::float32, {1}}, test::bytes_of<float>({scale}));
  return source;
}

/// Reads a packed weight of compressed-tensors that has this member in its configuration.
DequantizedCheckpoint packed(const std::vector<std::int32_t>& words, std::int64_t num_columns,
                             int bits, const std::string& member) {
  auto source = std::make_unique<MemoryCheckpoint>();
  source->add({"w_packed", DType::int32, {1, static_cast<std::int64_t>(words.size())}},
              test::bytes_of<std::int32_t>(words));
  source->add({"w_scale", DType::float32, {1, 1}}, test::bytes_of<float>({1}));
  source->add({"w_shape", DType::int64, {2}}, test::bytes_of<std::int64_t>({1, num_columns}));
  const Value config = parse_json(R"({"quantization_config": {)" + member +
                                      R"("config_groups": {"a": {"weights": {"num_bits": )" +
                                      std::to_string(bits) + "}}}}}",
                                  "config.json");
  return dequantize(std::move(source), DType::float32, {config}, {}, reshard::OnOverflow::refuse);
}

TEST(DequantizeTest, OldVersionsPutWholeIntegersIntoEachWord) {
  // The words are those that compressed-tensors 0.12.2 and 0.20.0 write.
  const std::vector<std::int32_t> old_words{0x08fac688, 0x2e};
  const std::vector<std::int32_t> new_words{static_cast<std::int32_t>(0x88fac688), 0xb};
  const auto numbers = test::bytes_of<float>({-4, -3, -2, -1, 0, 1, 2, 3, -4, -3, 2, 1});
  const auto of_old = packed(old_words, 12, 3, R"("version": "0.12.2", )");
  ASSERT_THAT(of_old.problems, IsEmpty());
  EXPECT_EQ(test::whole_tensor(*of_old.reader, 0), numbers);
  const auto of_new = packed(new_words, 12, 3, R"("version": "0.18.0", )");
  ASSERT_THAT(of_new.problems, IsEmpty());
  EXPECT_EQ(test::whole_tensor(*of_new.reader, 0), numbers);
  for (const char* version : {"", R"("version": "none", )"}) {
    const auto unknown = packed(old_words, 12, 3, version);
    ASSERT_THAT(unknown.problems, SizeIs(1));
    EXPECT_EQ(unknown.problems[0].found, "3, 3 (whole integers in each word)");
  }
}

TEST(DequantizeTest, TheNumberOfWordsTellsHowIntegersArePacked) {
  // four words of ten, ten, ten and one integers of 3 bits, which are the numbers plus 4
  std::vector<std::int32_t> words(4);
  std::vector<float> numbers;
  for (int i = 0; i < 31; ++i) {
    words[static_cast<std::size_t>(i / 10)] |= (i % 8) << (i % 10 * 3);
    numbers.push_back(static_cast<float>(i % 8 - 4));
  }
  const auto result = packed(words, 31, 3, "");
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(test::whole_tensor(*result.reader, 0), test::bytes_of<float>(numbers));
}

TEST(DequantizeTest, WordsOfSevenBitsAreNotTakenForEight) {
  const auto result = packed({0x01020304, 0x05060708}, 8, 7, R"("version": "0.14.0", )");
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(
      test::whole_tensor(*result.reader, 0),
      test::bytes_of<float>({4 - 64, 6 - 64, 8 - 64, 8 - 64, 8 - 64, 14 - 64, 24 - 64, 40 - 64}));
}

TEST(DequantizeTest, PackedZeroPointsMayHaveWholeIntegersToo) {
  const auto read = [](const std::vector<std::int32_t>& zeros, const std::string& version) {
    auto source = std::make_unique<MemoryCheckpoint>();
    source->add({"w_packed", DType::int32, {12, 1}},  // 12 rows of one code, 0
                test::bytes_of<std::int32_t>(std::vector<std::int32_t>(12, 4)));
    source->add({"w_scale", DType::float32, {12, 1}},
                test::bytes_of<float>(std::vector<float>(12, 1)));
    source->add({"w_shape", DType::int64, {2}}, test::bytes_of<std::int64_t>({12, 1}));
    source->add({"w_zero_point", DType::int32, {2, 1}}, test::bytes_of<std::int32_t>(zeros));
    const Value config =
        parse_json(R"({"quantization_config": {)" + version + R"("bits": 3}})", "c");
    return dequantize(std::move(source), DType::float32, {config}, {}, reshard::OnOverflow::refuse);
  };
  const auto numbers = test::bytes_of<float>({4, -1, 4, -1, 4, -1, 4, -1, 4, -1, -3, 2});
  const auto of_old = read({0x28a28a28, 0x17}, R"("version": "0.17.1", )");
  ASSERT_THAT(of_old.problems, IsEmpty());
  EXPECT_EQ(test::whole_tensor(*of_old.reader, 0), numbers);
  const auto of_new = read({static_cast<std::int32_t>(0xe8a28a28), 0x5}, R"("version": "1.0", )");
  ASSERT_THAT(of_new.problems, IsEmpty());
  EXPECT_EQ(test::whole_tensor(*of_new.reader, 0), numbers);
  EXPECT_THAT(read({0x28a28a28, 0x17}, "").problems, SizeIs(1));
}

TEST(DequantizeTest, FactorsOfInputsMultiplyTheColumns) {
  const auto source = [](Shape shape, const std::vector<float>& factors) {
    auto result = scaled_weight(1);
    result->add({"a.pre_quant_scale", DType::float32, std::move(shape)},
                test::bytes_of<float>(factors));
    return result;
  };
  const auto read = [](std::unique_ptr<MemoryCheckpoint> checkpoint) {
    return dequantize(std::move(checkpoint), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  };
  const auto result = read(source({2}, {3, -0.5F}));
  ASSERT_THAT(result.problems, IsEmpty());
  ASSERT_THAT(result.reader->contents().tensors, SizeIs(1));
  EXPECT_EQ(test::whole_tensor(*result.reader, 0), test::bytes_of<float>({3, -0.5F, 3, -0.5F}));
  EXPECT_EQ(result.num_companions, 2);
  EXPECT_THAT(read(source({2, 1}, {3, 4})).problems, SizeIs(1));
  EXPECT_THAT(read(source({1}, {3})).problems, SizeIs(1));
  EXPECT_THAT(read(source({2}, {1, std::numeric_limits<float>::infinity()})).problems, SizeIs(1));
  auto tied = source({2}, {3, 4});
  tied->add_alias("b.weight", "a.weight");
  EXPECT_THAT(read(std::move(tied)).problems, SizeIs(1));
}

TEST(DequantizeTest, AProductWithAFactorMayBeTooLarge) {
  auto source = scaled_weight(3e38F);
  source->add({"a.pre_quant_scale", DType::float32, {2}}, test::bytes_of<float>({1, -2}));
  const auto result =
      dequantize(std::move(source), DType::float64, {}, {}, reshard::OnOverflow::infinity);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(test::whole_tensor(*result.reader, 0),
            test::bytes_of<double>({3e38F, -kInfinity, 3e38F, -kInfinity}));
}

TEST(DequantizeTest, ALowRankPartIsRefused) {
  auto source = scaled_weight(1);
  source->add({"a.svdquant_lora_a", DType::float32, {1, 2}}, test::bytes_of<float>({3, 4}));
  source->add({"a.svdquant_lora_b", DType::float32, {2, 1}}, test::bytes_of<float>({3, 4}));
  const auto result =
      dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  ASSERT_THAT(result.problems, SizeIs(1));
  EXPECT_EQ(result.problems[0].where.fqn, "a.weight");
  EXPECT_EQ(result.problems[0].found, "a.svdquant_lora_a");
}

TEST(DequantizeTest, ScalesOfActivationsAreLeftOut) {
  auto source = scaled_weight(1);
  for (const char* name : {"a.activation_scale", "a.input_scale", "a.input_zero_point",
                           "a.output_activation_scale", "a.weight_activation_scale"}) {
    source->add({name, DType::float32, {1}}, test::bytes_of<float>({1}));
  }
  source->add({"b.activation_scale", DType::float32, {1}}, test::bytes_of<float>({1}));
  const auto result =
      dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  ASSERT_THAT(result.reader->contents().tensors, SizeIs(2));
  EXPECT_EQ(result.reader->contents().tensors[1].meta.fqn, "b.activation_scale");
  EXPECT_EQ(result.num_companions, 6);
}

TEST(DequantizeTest, TransformsOfActivationsAreRefused) {
  const auto problems_of = [](const std::string& member, const NameSelection& only = {}) {
    const Value config =
        parse_json(R"({"quantization_config": {"quant_method": "a", )" + member + "}}", "c");
    return dequantize(scaled_weight(1), DType::float32, {config}, only, reshard::OnOverflow::refuse)
        .problems;
  };
  const auto at = [](const std::string& location) {
    return R"("transform_config": {"config_groups": {"R": {"apply": [{"location": "weight_input"},
              {"location": ")" +
           location + R"("}]}}})";
  };
  EXPECT_THAT(problems_of(R"("transform_config": {})"), IsEmpty());
  EXPECT_THAT(problems_of(R"("transform_config": null)"), IsEmpty());
  EXPECT_THAT(problems_of(at("weight_output")), IsEmpty());
  const auto refused = problems_of(at("input"));
  ASSERT_THAT(refused, SizeIs(1));
  EXPECT_EQ(refused[0].found, "transform_config in config.json");
  EXPECT_THAT(problems_of(at("input"), NameSelection({"!a.weight"})), IsEmpty());
  EXPECT_THAT(problems_of(R"("transform_config": [1])"), SizeIs(1));
  EXPECT_THAT(problems_of(R"("rotation_config": {"hadamard_type": "hadamard"})"), SizeIs(1));
  EXPECT_THAT(problems_of(R"("spinquant_config": {"r1": true})"), SizeIs(1));
}

TEST(DequantizeTest, TiedCodesWithScalesOfTheirOwnAreRefused) {
  const auto read = [](const char* of_a, const char* of_b) {
    auto source = std::make_unique<MemoryCheckpoint>();
    source->add({"a", DType::int8, {1, 2}}, test::bytes_of<std::int8_t>({1, 2}));
    source->add({"a_scale", DType::float32, {1}}, test::bytes_of<float>({1}));
    source->add({of_a, DType::float32, {1}}, test::bytes_of<float>({1}));
    source->add({of_b, DType::float32, {1}}, test::bytes_of<float>({10}));
    source->add_alias("b", "a");
    if (std::string_view(of_b) != "b_scale") source->add_alias("b_scale", "a_scale");
    return dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse)
        .problems;
  };
  const auto scales = read("other", "b_scale");
  ASSERT_THAT(scales, SizeIs(1));
  EXPECT_EQ(scales[0].expected, "one tensor of scales for these codes");
  EXPECT_EQ(scales[0].found, "b_scale and a_scale");
  const auto zeros = read("a_zero_point", "b_zero_point");
  ASSERT_THAT(zeros, SizeIs(1));
  EXPECT_EQ(zeros[0].expected, "one tensor of zero points for these codes");
}

TEST(DequantizeTest, WeightsMayShareTheirZeroPoints) {
  auto source = std::make_unique<MemoryCheckpoint>();
  for (const std::string name : {"a", "b"}) {
    source->add({name, DType::int8, {1, 2}}, test::bytes_of<std::int8_t>({1, 2}));
    source->add({name + "_scale", DType::float32, {1}}, test::bytes_of<float>({10}));
  }
  source->add({"a_zero_point", DType::int8, {1}}, test::bytes_of<std::int8_t>({1}));
  source->add_alias("b_zero_point", "a_zero_point");
  const auto result =
      dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(test::whole_tensor(*result.reader, 0), test::bytes_of<float>({0, 10}));
  EXPECT_EQ(test::whole_tensor(*result.reader, 1), test::bytes_of<float>({0, 10}));
}

TEST(DequantizeTest, ScaledActivationsOfAwqAreRefused) {
  for (const std::string name : {"h.act.scales", "h.gelu_impl.scales", "h.contact.scales"}) {
    auto source = std::make_unique<MemoryCheckpoint>();
    source->add({"w.qweight", DType::int32, {8, 1}},
                test::bytes_of<std::int32_t>(std::vector<std::int32_t>(8, 0)));
    source->add({"w.qzeros", DType::int32, {1, 1}}, test::bytes_of<std::int32_t>({0}));
    source->add({"w.scales", DType::float16, {1, 8}}, test::Bytes(16));
    source->add({name, DType::float16, {8}}, test::Bytes(16));
    const auto result =
        dequantize(std::move(source), DType::float16, {}, {}, reshard::OnOverflow::refuse);
    EXPECT_THAT(result.problems, SizeIs(name == "h.contact.scales" ? 0 : 1)) << name;
  }
}

TEST(DequantizeTest, ZeroPointsThatProgramsReadDifferentlyAreTold) {
  const auto notes_of = [](const std::string& members, const NameSelection& only = {}) {
    auto source = std::make_unique<MemoryCheckpoint>();
    source->add({"w.qweight", DType::int32, {1, 8}},
                test::bytes_of<std::int32_t>(std::vector<std::int32_t>(8, 0)));
    source->add({"w.qzeros", DType::int32, {1, 1}}, test::bytes_of<std::int32_t>({0x7f7777f7}));
    source->add({"w.scales", DType::float16, {1, 8}}, test::Bytes(16));
    const Value config = parse_json(
        R"({"quantization_config": {"quant_method": "gptq", "bits": 4)" + members + "}}", "c");
    auto result =
        dequantize(std::move(source), DType::float16, {config}, only, reshard::OnOverflow::refuse);
    EXPECT_THAT(result.problems, IsEmpty());
    return result.reader->contents().opening_findings;
  };
  const auto notes = notes_of("");
  ASSERT_THAT(notes, SizeIs(1));
  EXPECT_EQ(notes[0].found,
            "2 of the largest integer in 1 weight ('w.weight'), read as this integer plus 1, as "
            "AutoGPTQ does (GPTQModel reads 0)");
  EXPECT_THAT(notes_of(R"(, "sym": false)"), SizeIs(1));
  EXPECT_THAT(notes_of(R"(, "sym": true)"), IsEmpty());
  EXPECT_THAT(notes_of(R"(, "checkpoint_format": "gptq_v2")"), IsEmpty());
  EXPECT_THAT(notes_of("", NameSelection({"!w.weight"})), IsEmpty());
}

TEST(DequantizeTest, TheConfigurationSaysHowZeroPointsAreStored) {
  const FileSystem& fs = FileSystem::posix();
  const auto read = [&](const std::string& members) {
    const Value config = parse_json(R"({"quantization_config": {)" + members + "}}", "c");
    return dequantize(formats::open_checkpoint(fs, folder() + "gptq"), DType::float16, {config}, {},
                      reshard::OnOverflow::refuse);
  };
  const auto first = read(R"("quant_method": "gptq")");
  const auto second = read(R"("quant_method": "gptq", "checkpoint_format": "gptq_v2")");
  ASSERT_THAT(first.problems, IsEmpty());
  ASSERT_THAT(second.problems, IsEmpty());
  const auto up = [](const DequantizedCheckpoint& of) {
    const auto& tensors = of.reader->contents().tensors;
    const auto* const found = of.reader->contents().find_tensor("up.weight");
    return test::whole_tensor(*of.reader, static_cast<std::size_t>(found - tensors.data()));
  };
  ASSERT_NE(up(first), up(second));
  for (const std::string format : {"auto_gptq", "gptq"}) {
    const auto result =
        read(R"("quant_method": "auto-round", "packing_format": "auto_round:)" + format + '"');
    ASSERT_THAT(result.problems, IsEmpty()) << format;
    EXPECT_EQ(up(result), up(first)) << format;
  }
  for (const std::string format : {"auto_round", "auto_round:gptqmodel"}) {
    const auto result = read(R"("quant_method": "auto-round", "packing_format": ")" + format + '"');
    ASSERT_THAT(result.problems, IsEmpty()) << format;
    EXPECT_EQ(up(result), up(second)) << format;
  }
  const auto unknown = read(R"("quant_method": "auto-round", "packing_format": "auto_round:new")");
  ASSERT_THAT(unknown.problems, Not(IsEmpty()));
  EXPECT_EQ(unknown.problems[0].found, "auto-round in format auto_round:new");
  EXPECT_THAT(read(R"("quant_method": "gptq", "checkpoint_format": "marlin")").problems,
              Not(IsEmpty()));
}

TEST(DequantizeTest, EachSourceOfAMergeHasItsOwnConfiguration) {
  const auto config_with_blocks_of = [](const std::string& columns) {
    return parse_json(R"({"quantization_config": {"weight_block_size": [1, )" + columns + "]}}",
                      "c");
  };
  const auto read = [](const std::vector<Value>& configs) {
    std::vector<formats::MergeSource> sources;
    for (const char* prefix : {"a", "b"}) {
      auto source = std::make_unique<MemoryCheckpoint>(prefix);
      source->add({"w", DType::int8, {1, 6}}, test::bytes_of<std::int8_t>({1, 1, 1, 1, 1, 1}));
      source->add({"w_scale", DType::float32, {1, 2}}, test::bytes_of<float>({1, 2}));
      sources.push_back({std::move(source), prefix});
    }
    auto merge = formats::merge_checkpoints(std::move(sources), formats::MergePreference::none);
    return dequantize(std::move(merge.reader), DType::float32, configs, {},
                      reshard::OnOverflow::refuse);
  };
  const auto result = read({config_with_blocks_of("3"), config_with_blocks_of("4")});
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(test::whole_tensor(*result.reader, 0), test::bytes_of<float>({1, 1, 1, 2, 2, 2}));
  EXPECT_EQ(test::whole_tensor(*result.reader, 1), test::bytes_of<float>({1, 1, 1, 1, 2, 2}));
  const auto without_second = read({config_with_blocks_of("3"), Value()});
  ASSERT_THAT(without_second.problems, SizeIs(1));
  EXPECT_EQ(without_second.problems[0].where.fqn, "b.w");
}

/// Dequantizes a weight `l.weight` whose scales may be stored in several orders.
std::vector<formats::Finding> problems_of_small_floats(DType codes, DType scales,
                                                       const char* second, const char* config) {
  auto source = std::make_unique<MemoryCheckpoint>();
  const std::int64_t num_scales = codes == DType::uint8 && scales == DType::uint8 ? 1 : 2;
  const std::int64_t num_codes = codes == DType::uint8 ? 16 : 64;
  source->add({"l.weight", codes, {1, num_codes}},
              test::Bytes(static_cast<std::size_t>(num_codes), std::byte{0x12}));
  source->add({"l.weight_scale", scales, {1, num_scales}},
              test::Bytes(static_cast<std::size_t>(num_scales), std::byte{0x38}));
  if (second != nullptr) source->add({second, DType::float32, {}}, test::bytes_of<float>({2}));
  return dequantize(std::move(source), DType::float32, {parse_json(config, "c")}, {},
                    reshard::OnOverflow::refuse)
      .problems;
}

TEST(DequantizeTest, AConfigurationMustDescribeSmallFloatsThatAreNotPacked) {
  const struct {
    DType codes;
    DType scales;
    const char* second;
  } cases[] = {{DType::uint8, DType::float8_e4m3fn, "l.weight_global_scale"},  // of LightX2V
               {DType::uint8, DType::float8_e4m3fn, "l.weight_scale_2"},
               {DType::uint8, DType::uint8, nullptr},
               {DType::float8_e4m3fn, DType::uint8, nullptr}};
  for (const auto& [codes, scales, second] : cases) {
    SCOPED_TRACE(std::string(dtype_name(codes)) + " " + (second ? second : ""));
    const auto problems = problems_of_small_floats(codes, scales, second, "{}");
    ASSERT_THAT(problems, SizeIs(1));
    EXPECT_EQ(problems[0].where.fqn, "l.weight");
    EXPECT_THAT(problems[0].expected, testing::HasSubstr("quantization_config"));
    EXPECT_THAT(
        problems_of_small_floats(codes, scales, second,
                                 R"({"quantization_config": {"quant_method": "modelopt"}})"),
        IsEmpty());
    EXPECT_THAT(problems_of_small_floats(
                    codes, scales, second,
                    R"({"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}})"),
                IsEmpty());
  }
}

/// A weight of int8 with one scale for each row.
std::unique_ptr<MemoryCheckpoint> int8_weight() {
  auto source = std::make_unique<MemoryCheckpoint>();
  source->add({"l.bias", DType::float32, {2}}, test::bytes_of<float>({1, 2}));
  source->add({"l.input_scale", DType::float32, {1}}, test::bytes_of<float>({1}));
  source->add({"l.weight", DType::int8, {2, 1}}, test::bytes_of<std::int8_t>({1, 2}));
  source->add({"l.weight_scale", DType::float32, {2, 1}}, test::bytes_of<float>({1, 10}));
  return source;
}

std::vector<formats::Finding> problems_of(std::unique_ptr<MemoryCheckpoint> source,
                                          const char* config = "{}",
                                          const NameSelection& only = {}) {
  return dequantize(std::move(source), DType::float32, {parse_json(config, "c")}, only,
                    reshard::OnOverflow::refuse)
      .problems;
}

TEST(DequantizeTest, Int8OfUnknownSchemesIsRefused) {
  EXPECT_THAT(problems_of(int8_weight()), IsEmpty());
  for (const char* name :
       {"weight_offset", "weight_zp", "zero_point", "offset", "zeros", "weight_min", "deq_scale",
        "quant_bias", "scale_bias", "weight_scale_second", "input_offset"}) {
    auto source = int8_weight();
    source->add({std::string("l.") + name, DType::float32, {2, 1}}, test::bytes_of<float>({0, 3}));
    const auto problems = problems_of(std::move(source));
    ASSERT_THAT(problems, SizeIs(1)) << name;
    EXPECT_EQ(problems[0].found, std::string("l.") + name);
  }
  for (const char* name : {"l.zeros.weight", "l2.zeros", "l.lora_A", "zeros"}) {
    auto source = int8_weight();
    source->add({name, DType::float32, {1}}, test::bytes_of<float>({3}));
    EXPECT_THAT(problems_of(std::move(source)), IsEmpty()) << name;
  }
}

TEST(DequantizeTest, OffsetsOfZeroChangeNothing) {
  auto source = int8_weight();
  source->add({"l.weight_offset", DType::float32, {2, 1}}, test::bytes_of<float>({0, 0}));
  const auto result =
      dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(result.reader->contents().find_tensor("l.weight_offset"), nullptr);
}

TEST(DequantizeTest, Int8OfChatGlmMayHoldTwoNumbersInEachElement) {
  const auto problems = problems_of(int8_weight(), R"({"quantization_bit": 4})");
  ASSERT_THAT(problems, SizeIs(1));
  EXPECT_EQ(problems[0].found, "quantization_bit 4 in config.json");
  EXPECT_THAT(problems_of(int8_weight(), R"({"quantization_bit": 8})"), IsEmpty());
  EXPECT_THAT(problems_of(int8_weight(), R"({"quantization_bit": 0})"), IsEmpty());
}

TEST(DequantizeTest, FormatsOfComfyUiMustBeCodesTimesScales) {
  const auto in_tensor = [](const std::string& text) {
    auto source = int8_weight();
    source->add({"l.comfy_quant", DType::uint8, {static_cast<std::int64_t>(text.size())}},
                test::bytes_of<char>({text.begin(), text.end()}));
    return source;
  };
  const auto in_annotation = [](const std::string& text) {
    auto source = int8_weight();
    source->contents_for_change().annotations["_quantization_metadata"] = text;
    return source;
  };
  const std::pair<std::string, std::string> cases[] = {
      {R"({"format": "int8_tensorwise"})", ""},
      {R"({"format": "int8_tensorwise", "convrot": false})", ""},
      {R"({"format": "float8_e4m3fn", "full_precision_matrix_mult": true})", ""},
      {R"({"format": "int8_tensorwise", "convrot": true})", "int8_tensorwise with convrot"},
      {R"({"format": "nvfp4"})", "nvfp4"},
      {R"({"format": 1})", "no format"},
      {R"([])", "no format"}};
  for (const auto& [text, found] : cases) {
    SCOPED_TRACE(text);
    for (const bool is_tensor : {true, false}) {
      const auto problems = problems_of(
          is_tensor ? in_tensor(text) : in_annotation(R"({"layers": {"l": )" + text + "}}"));
      ASSERT_THAT(problems, SizeIs(found.empty() ? 0 : 1));
      if (found.empty()) continue;
      EXPECT_EQ(problems[0].where.fqn, "l.weight");
      EXPECT_EQ(problems[0].found,
                found + " in " + (is_tensor ? "l.comfy_quant" : "_quantization_metadata"));
    }
  }
  EXPECT_THAT(problems_of(in_tensor("{")), SizeIs(1));
  EXPECT_THAT(problems_of(in_tensor("")), SizeIs(1));
  EXPECT_THAT(problems_of(in_annotation("{")), SizeIs(1));
  EXPECT_THAT(problems_of(in_annotation("{}")), SizeIs(1));
  const NameSelection others({"!l.weight"});
  EXPECT_THAT(problems_of(in_tensor("{"), "{}", others), IsEmpty());
  EXPECT_THAT(problems_of(in_annotation(R"({"layers": {"l": 1}})"), "{}", others), IsEmpty());
  // In a merge, the layers' names have the prefix of their source.
  std::vector<formats::MergeSource> sources;
  sources.push_back({in_annotation(R"({"layers": {"l": {"format": "nvfp4"}}})"), "a"});
  sources.push_back({int8_weight(), "b"});
  auto merged =
      formats::merge_checkpoints(std::move(sources), formats::MergePreference::none).reader;
  const auto of_merge = dequantize(std::move(merged), DType::float32, {Value(), Value()},
                                   NameSelection({"a"}), reshard::OnOverflow::refuse);
  ASSERT_THAT(of_merge.problems, SizeIs(1));
  EXPECT_EQ(of_merge.problems[0].where.fqn, "a.l.weight");
  // A layer of which no scales are known.
  auto unknown = int8_weight();
  unknown->add({"m.comfy_quant", DType::uint8, {2}}, test::bytes_of<char>({'{', '}'}));
  unknown->add({"m.weight", DType::int8, {1, 1}}, test::bytes_of<std::int8_t>({1}));
  EXPECT_THAT(problems_of(std::move(unknown)), SizeIs(1));
}

TEST(DequantizeTest, NumbersHaveNoDescriptionOfCodes) {
  auto source = int8_weight();
  source->contents_for_change().annotations = {
      {"a", "b"},
      {"_quantization_metadata", R"({"layers": {"l": {"format": "int8_tensorwise"}}})"}};
  const auto result =
      dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_THAT(result.reader->contents().annotations, testing::ElementsAre(testing::Pair("a", "b")));
}

TEST(DequantizeTest, CodesWithoutAScaleAreRefused) {
  const Value config = parse_json(R"({"quantization_config": {"quant_method": "fp8"}})", "c");
  for (const DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2fnuz, DType::int8}) {
    for (const bool selects : {true, false}) {
      auto source = scaled_weight(1);
      source->add({"b.weight", dtype, {2, 1}}, test::bytes_of<std::uint8_t>({1, 2}));
      const auto result =
          dequantize(std::move(source), DType::float32, {config},
                     selects ? NameSelection() : NameSelection(std::vector<std::string>{"a"}),
                     reshard::OnOverflow::refuse);
      ASSERT_THAT(result.problems, SizeIs(selects ? 1 : 0));
      if (!selects) continue;
      EXPECT_EQ(result.problems[0].where.fqn, "b.weight");
      EXPECT_EQ(result.problems[0].expected,
                "a scale beside codes of " + std::string(dtype_name(dtype)));
    }
  }
}

TEST(DequantizeTest, PackedCodesWithoutAScaleAreRefused) {
  for (const char* name : {"b.weight_packed", "b.qweight", "b_blocks", "b.W_q", "b.weight"}) {
    for (const DType dtype : {DType::uint8, DType::int32}) {
      SCOPED_TRACE(name);
      const auto problems_of = [&](const std::string& config) {
        auto source = scaled_weight(1);
        source->add({name, dtype, {1, 2}}, std::vector<std::byte>(2 * itemsize(dtype)));
        return dequantize(std::move(source), DType::float32, {parse_json(config, "c")}, {},
                          reshard::OnOverflow::refuse)
            .problems;
      };
      EXPECT_THAT(problems_of("{}"), IsEmpty());
      const auto problems = problems_of(R"({"quantization_config": {"quant_method": "fp8"}})");
      ASSERT_THAT(problems, SizeIs(1));
      EXPECT_EQ(problems[0].where.fqn, name);
    }
  }
}

TEST(DequantizeTest, NumbersThatASchemeDoesNotUseAreRefused) {
  const auto read = [](DType dtype, const char* scale, const char* other, std::int32_t number) {
    auto source = std::make_unique<MemoryCheckpoint>();
    const bool is_packed = dtype == DType::uint8 || dtype == DType::int32;
    const std::string weight = is_packed ? "a.weight_packed" : "a.weight";
    source->add({weight, dtype, {1, 16}}, std::vector<std::byte>(16 * itemsize(dtype)));
    if (std::string_view(scale) == "exponents") {
      source->add({"a.weight_scale", DType::uint8, {1, 1}}, test::bytes_of<std::uint8_t>({127}));
    } else {
      source->add({"a.weight_scale", DType::float32, {1, 1}}, test::bytes_of<float>({1}));
    }
    if (dtype == DType::int32) {
      source->add({"a.weight_shape", DType::int64, {2}}, test::bytes_of<std::int64_t>({1, 128}));
    }
    source->add({other, DType::int32, {1, 1}}, test::bytes_of<std::int32_t>({number}));
    return dequantize(std::move(source), DType::float32, {}, {}, reshard::OnOverflow::refuse);
  };
  for (const auto& [dtype, scale, other] : std::vector<std::tuple<DType, const char*, const char*>>{
           {DType::float8_e4m3fn, "numbers", "a.weight_scale_2"},
           {DType::float8_e4m3fn, "numbers", "a.weight_global_scale"},
           {DType::int8, "numbers", "a.weight_scale_2"},
           {DType::int32, "numbers", "a.weight_global_scale"},
           {DType::uint8, "exponents", "a.weight_zero_point"}}) {
    SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + other);
    const auto result = read(dtype, scale, other, 3);
    ASSERT_THAT(result.problems, SizeIs(1));
    EXPECT_EQ(result.problems[0].found, other);
  }
  // Zero points that are 0 change nothing.
  EXPECT_THAT(read(DType::uint8, "exponents", "a.weight_zero_point", 0).problems, IsEmpty());
}

TEST(DequantizeTest, NumbersThatBecomeZeroAreCounted) {
  for (const float scale : {1e-9F, 1.0F}) {
    const auto losses = std::make_shared<RoundingLosses>();
    const auto result = dequantize(scaled_weight(scale), DType::float16, {}, {},
                                   reshard::OnOverflow::refuse, losses);
    ASSERT_THAT(result.problems, IsEmpty());
    EXPECT_THAT(losses->all(), IsEmpty());
    for (int i = 0; i < 2; ++i) test::whole_tensor(*result.reader, 0);  // counted once
    EXPECT_THAT(losses->all(), SizeIs(scale < 1 ? 1 : 0));
    if (scale < 1) {
      EXPECT_EQ(losses->all().at("a.weight").num_became_zero,
                numel_of(result.reader->contents().tensors[0].meta.shape));
    }
  }
}

}  // namespace
}  // namespace tessera::arithmetic
