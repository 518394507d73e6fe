#include "tessera/formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include "base/digest.h"
#include "base/json.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fault_file_system.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "support/random.h"
#include "support/reading.h"
#include "support/temporary_directory.h"

namespace tessera::formats {
namespace {

using test::bytes_of;
using test::fixture;
using test::MemoryCheckpoint;
using test::ThrowsError;
using test::values_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string digest_of(std::string_view json) {
  char hex[17];
  std::snprintf(hex, sizeof hex, "%016llx",
                static_cast<unsigned long long>(xxh3_64(std::as_bytes(std::span(json)))));
  return hex;
}

class SafetensorsTest : public ::testing::Test {
 protected:
  std::unique_ptr<CheckpointReader> open(const std::string& path) {
    return open_safetensors(fs_, path);
  }

  void write(const MemoryCheckpoint& source, const std::string& name,
             const SafetensorsWriteOptions& options = {},
             OverwritePolicy overwrite = OverwritePolicy::refuse) {
    const auto writer = create_safetensors(fs_, tmp_ / name, source.contents(), values_of(source),
                                           overwrite, options);
    test::copy_checkpoint(source, *writer);
  }

  void put(const std::string& name, std::string_view text) {
    const auto file = fs_.create(tmp_ / name);
    file->write_at(0, std::as_bytes(std::span(text)));
    file->close();
  }

  /// Writes a file with that header and `data_nbytes` zeros behind it.
  void put_safetensors(const std::string& name, std::string header, std::size_t data_nbytes) {
    std::string length(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
    put(name, length + header + std::string(data_nbytes, '\0'));
  }

  std::string text(const std::string& name) { return read_file(fs_, tmp_ / name, 1 << 24); }

  FileSystem& fs_ = FileSystem::posix();
  test::TemporaryDirectory tmp_;
};

/// A checkpoint with one of everything that safetensors and its values file can hold.
MemoryCheckpoint make_rich_checkpoint() {
  MemoryCheckpoint source;
  source.add({"embed.weight", DType::bfloat16, {3, 2}},
             bytes_of<std::uint16_t>({1, 2, 3, 4, 5, 6}));
  source.add({"empty", DType::float64, {0, 7}}, {});
  source.add({"flag", DType::boolean, {3}}, bytes_of<std::uint8_t>({1, 0, 1}));
  source.add({"nan", DType::float32, {2}}, bytes_of<std::uint32_t>({0x7FC00001, 0xFF812345}));
  source.add({"packed", DType::float4_e2m1fn_x2, {2, 2}}, bytes_of<std::uint8_t>({1, 2, 3, 4}));
  TensorEntry& state =
      source.add({"state.0.exp_avg", DType::float32, {3, 2}}, bytes_of<float>({1, 2, 3, 4, 5, 6}));
  state.kind = StateKind::pointwise;
  state.parameter = "embed.weight";
  state.key_path = {"state", *dict_key(0), "exp_avg"};
  source.add({"step", DType::int64, {}}, bytes_of<std::int64_t>({41}));
  source.add_value("$lr", 1e-3);
  source.add_value("betas", Value::Tuple{{0.9, 0.999}});
  source.add_value("seen.0", true).key_path = {"seen", 0};
  source.add_alias("head.weight", "embed.weight");
  source.contents_for_change().annotations = {{"note", "naïve \"模型\"\n"}};
  source.contents_for_change().units = {
      make_flat_unit("", DType::bfloat16, {{"embed.weight", {3, 2}}, {"head.bias", {0}}})};
  return source;
}

void expect_rich_checkpoint(const CheckpointReader& reader) {
  const MemoryCheckpoint source = make_rich_checkpoint();
  const CheckpointContents& expected = source.contents();
  const CheckpointContents& found = reader.contents();
  ASSERT_EQ(found.tensors.size(), expected.tensors.size());
  for (std::size_t i = 0; i < found.tensors.size(); ++i) {
    SCOPED_TRACE(expected.tensors[i].meta.fqn);
    EXPECT_EQ(found.tensors[i].meta, expected.tensors[i].meta);
    EXPECT_EQ(found.tensors[i].kind, expected.tensors[i].kind);
    EXPECT_EQ(found.tensors[i].parameter, expected.tensors[i].parameter);
    EXPECT_EQ(found.tensors[i].key_path, expected.tensors[i].key_path);
    EXPECT_EQ(test::whole_tensor(reader, i), test::whole_tensor(source, i));
  }
  ASSERT_EQ(found.values.size(), expected.values.size());
  for (std::size_t i = 0; i < found.values.size(); ++i) {
    EXPECT_EQ(found.values[i].name, expected.values[i].name);
    EXPECT_EQ(found.values[i].key_path, expected.values[i].key_path);
    EXPECT_EQ(reader.read_value(i), source.read_value(i));
  }
  ASSERT_EQ(found.aliases.size(), 1U);
  EXPECT_EQ(found.aliases[0].fqn, "head.weight");
  EXPECT_EQ(found.aliases[0].target, "embed.weight");
  EXPECT_EQ(found.units, expected.units);
  EXPECT_EQ(found.annotations,
            (std::map<std::string, std::string>{{"format", "pt"}, {"note", "naïve \"模型\"\n"}}));
}

/// A checkpoint without values, whose tensors have facts that safetensors itself cannot store.
MemoryCheckpoint make_nested_checkpoint() {
  MemoryCheckpoint source;
  source.add({"model.x", DType::uint8, {1}}, bytes_of<std::uint8_t>({1})).key_path = {"model", "x"};
  TensorEntry& state = source.add({"model.y", DType::uint8, {1}}, bytes_of<std::uint8_t>({2}));
  state.key_path = {"model", "y"};
  state.kind = StateKind::pointwise;
  state.parameter = "model.x";
  source.contents_for_change().units = {make_flat_unit("", DType::uint8, {{"model.x", {1}}})};
  return source;
}

void expect_nested_checkpoint(const CheckpointReader& reader) {
  const CheckpointContents& found = reader.contents();
  EXPECT_THAT(found.missing_files, ::testing::IsEmpty());
  ASSERT_EQ(found.tensors.size(), 2U);
  EXPECT_EQ(found.tensors[0].key_path, (KeyPath{"model", "x"}));
  EXPECT_EQ(found.tensors[1].key_path, (KeyPath{"model", "y"}));
  EXPECT_EQ(found.tensors[1].kind, StateKind::pointwise);
  EXPECT_EQ(found.tensors[1].parameter, "model.x");
  ASSERT_EQ(found.units.size(), 1U);
  EXPECT_EQ(found.units[0].parameters[0].fqn, "model.x");
}

TEST_F(SafetensorsTest, ReadsWhatPythonWrote) {
  std::size_t num_read = 0;
  for (const auto& entry : std::filesystem::directory_iterator(fixture("safetensors/valid"))) {
    const std::string path = entry.path().string();
    if (path.ends_with(".expect.json")) continue;
    SCOPED_TRACE(path);
    test::expect_holds(*open(path), path + ".expect.json");
    ++num_read;
  }
  EXPECT_GE(num_read, 8U);
}

TEST_F(SafetensorsTest, AnIndexFileOpensLikeItsDirectory) {
  const std::string path = fixture("safetensors/valid/sharded");
  const auto reader = open(path + "/model.safetensors.index.json");
  test::expect_holds(*reader, path + ".expect.json");
  EXPECT_EQ(reader->contents().world_size, 3);
  EXPECT_EQ(reader->piece_storage(0, 0).file, "model-00001-of-00003.safetensors");
}

TEST_F(SafetensorsTest, ShardsOfPyTorchsDistributedCheckpointMakeWholeTensors) {
  for (const std::string name : {"hf_distributed", "hf_consolidated", "hf_consolidated/sharded"}) {
    const std::string path = fixture("dcp/valid/" + name);
    const auto reader = open(path);
    test::expect_holds(*reader,
                       fixture("dcp/valid/" + name.substr(0, name.find('/'))) + ".expect.json");
    EXPECT_EQ(reader->contents().world_size, name == "hf_consolidated" ? 2 : 4);
    for (const TensorEntry& tensor : reader->contents().tensors) {
      std::vector<Region> regions;
      for (const Piece& piece : tensor.pieces) regions.push_back(piece.region);
      EXPECT_THAT(check_coverage(regions, tensor.meta.shape), ::testing::IsEmpty());
    }
  }
}

TEST_F(SafetensorsTest, OneShardOfPyTorchsDistributedCheckpointIsAPart) {
  const std::string folder = fixture("dcp/valid/hf_distributed/");
  const std::string name = "shard-00003-model-00001-of-00002.safetensors";
  const auto reader = open(folder + name);
  ASSERT_TRUE(reader->contents().part);
  EXPECT_EQ(part_in_words(*reader->contents().part),
            "one file of 8: the shards that one rank saved with HuggingFaceStorageWriter");
  ASSERT_FALSE(reader->contents().tensors.empty());
  for (const TensorEntry& tensor : reader->contents().tensors) {
    EXPECT_EQ(tensor.pieces[0].region, Region(whole_box(tensor.meta.shape)));
  }
  // A copy without the other shards is also a part, under this name and under another one.
  for (const std::string& copy : {name, std::string("renamed.safetensors")}) {
    std::filesystem::copy_file(folder + name, tmp_ / copy);
    const auto alone = open(tmp_ / copy);
    ASSERT_TRUE(alone->contents().part) << copy;
    EXPECT_EQ(alone->contents().part->num_parts, std::nullopt);
  }
}

TEST_F(SafetensorsTest, ARankWithoutAShardIsTold) {
  std::filesystem::create_directory(tmp_ / "c");
  for (const std::string rank : {"1", "3"}) {
    std::filesystem::copy_file(
        fixture("dcp/valid/hf_distributed/shard-0000" + rank + "-model-00001-of-00002.safetensors"),
        tmp_ / ("c/shard-0000" + rank + "-model-00001-of-00002.safetensors"));
  }
  const auto reader = open(tmp_ / "c");
  const auto& findings = reader->contents().opening_findings;
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].found,
            "none of rank 2 (did this rank have nothing to save, or is its file lost?)");
  EXPECT_THAT(open(fixture("dcp/valid/hf_distributed"))->contents().opening_findings,
              ::testing::IsEmpty());
}

std::string header_of_shard(const std::string& sharding_info) {
  return R"({"__metadata__":{"DCP_SHARDING_INFO":"{)" + sharding_info +
         R"(}"},"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})";
}

TEST_F(SafetensorsTest, ShardingInfoOfATensorThatTheFileLacksIsCorruption) {
  put_safetensors("a.safetensors",
                  header_of_shard(R"(\"lost\":{\"saved_offsets\":[0]},)"
                                  R"(\"w\":{\"saved_offsets\":[0]})"),
                  2);
  EXPECT_THAT([&] { open(tmp_ / "a.safetensors"); },
              ThrowsError(ErrorKind::corruption, "lost: DCP_SHARDING_INFO"));
}

TEST_F(SafetensorsTest, AShardInTwoFilesIsTold) {
  std::filesystem::create_directory(tmp_ / "d");
  for (const std::string rank : {"1", "2"}) {
    put_safetensors("d/shard-0000" + rank + "-model-00001-of-00001.safetensors",
                    header_of_shard(R"(\"w\":{\"saved_offsets\":[0]})"), 2);
  }
  const auto reader = open(tmp_ / "d");
  std::vector<std::string> found;
  for (const Finding& finding : reader->contents().opening_findings) {
    found.push_back(finding.found);
  }
  EXPECT_THAT(found, ElementsAre(HasSubstr("the same shard in several files: w (one of them is")));
}

TEST_F(SafetensorsTest, AFileThatRankZeroSavedAloneIsWhole) {
  put_safetensors("model-00001-of-00001.safetensors",
                  R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"a\":{\"saved_offsets\":[0]}}"},)"
                  R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1);
  EXPECT_FALSE(open(tmp_ / "model-00001-of-00001.safetensors")->contents().part);
}

TEST_F(SafetensorsTest, RefusesEveryInvalidFileByName) {
  for (const test::InvalidFixture& invalid : test::invalid_fixtures("safetensors")) {
    SCOPED_TRACE(invalid.path + ": " + invalid.rule);
    try {
      const auto reader = open(invalid.path);  // a tensor of a dtype that torch lacks is a value
      for (std::size_t v = 0; v < reader->contents().values.size(); ++v) reader->read_value(v);
      ADD_FAILURE() << "was read";
    } catch (const Error& error) {
      EXPECT_TRUE(error.kind() == ErrorKind::corruption || error.kind() == ErrorKind::unsupported)
          << to_string(error.kind());
      for (const std::string& words : invalid.contains) EXPECT_THAT(error.what(), HasSubstr(words));
    }
  }
}

TEST_F(SafetensorsTest, RefusesATruncationAtEveryByte) {
  const std::string whole =
      read_file(fs_, fixture("safetensors/valid/single.safetensors"), 1 << 20);
  for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    put("cut.safetensors", std::string_view(whole).substr(0, nbytes));
    EXPECT_THAT([&] { open(tmp_ / "cut.safetensors"); }, ThrowsError(ErrorKind::corruption, "cut"))
        << nbytes;
    fs_.remove_all(tmp_ / "cut.safetensors");
  }
}

TEST_F(SafetensorsTest, DamagedHeadersAreRefusedOrReadButNeverCrash) {
  const std::string whole =
      read_file(fs_, fixture("safetensors/valid/single.safetensors"), 1 << 20);
  test::Random random;
  int num_refused = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string damaged = whole;
    for (auto flips = random.between(1, 4); flips > 0; --flips) {
      damaged[static_cast<std::size_t>(random.between(0, 300))] ^=
          static_cast<char>(1 << random.between(0, 8));
    }
    put("damaged.safetensors", damaged);
    try {
      const auto reader = open(tmp_ / "damaged.safetensors");
      for (std::size_t i = 0; i < reader->contents().tensors.size(); ++i) {
        test::whole_tensor(*reader, i);
      }
    } catch (const Error& error) {
      ++num_refused;
      EXPECT_TRUE(error.kind() == ErrorKind::corruption || error.kind() == ErrorKind::unsupported)
          << error.what();
    }
    fs_.remove_all(tmp_ / "damaged.safetensors");
  }
  EXPECT_GT(num_refused, 1000);
}

TEST_F(SafetensorsTest, UnknownFieldsOfAnEntryAreIgnoredAsInPython) {
  put_safetensors("a.safetensors",
                  R"({"__metadata__":null,"a":{"x":{"y":[1,{"dtype":2}]},"dtype":"U8","z":null,)"
                  R"("shape":[2],"w":[[],"s",1.5],"data_offsets":[0,2],"v":true}})",
                  2);
  const auto reader = open(tmp_ / "a.safetensors");
  EXPECT_EQ(reader->contents().tensors[0].meta, (TensorMeta{"a", DType::uint8, {2}}));
}

TEST_F(SafetensorsTest, AHugeShapeCostsNothing) {
  put_safetensors("a.safetensors",
                  R"({"a":{"dtype":"U8","shape":[1152921504606846976],"data_offsets":[0,4]}})", 4);
  EXPECT_THAT([&] { open(tmp_ / "a.safetensors"); },
              ThrowsError(ErrorKind::corruption,
                          "a.safetensors: a: data_offsets: expected 1152921504606846976 bytes"));
}

TEST_F(SafetensorsTest, TiedNamesOfSaveModelBecomeAliases) {
  put_safetensors("a.safetensors",
                  R"({"__metadata__":{"format":"a","head":"a","note":"b"},)"
                  R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1);
  const auto reader = open(tmp_ / "a.safetensors");
  ASSERT_EQ(reader->contents().aliases.size(), 1U);
  EXPECT_EQ(reader->contents().aliases[0].fqn, "head");
  EXPECT_EQ(reader->contents().aliases[0].target, "a");
  EXPECT_EQ(reader->contents().annotations.size(), 2U);
}

// The JSON of aliases has such names in the `$dict` form.
TEST_F(SafetensorsTest, AnAliasMayBeginWithADollarSign) {
  put_safetensors("a.safetensors",
                  R"({"__metadata__":{"tessera.aliases":"{\"$dict\":[[\"$x.z\",\"$x.y\"]]}"},)"
                  R"("$x.y":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1);
  const auto reader = open(tmp_ / "a.safetensors");
  ASSERT_EQ(reader->contents().aliases.size(), 1U);
  EXPECT_EQ(reader->contents().aliases[0].fqn, "$x.z");
  EXPECT_EQ(reader->contents().aliases[0].target, "$x.y");
  put_safetensors("b.safetensors",
                  R"({"__metadata__":{"tessera.aliases":"{\"$dict\":[[1,\"a\"]]}"},)"
                  R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1);
  EXPECT_THAT([&] { open(tmp_ / "b.safetensors"); },
              ThrowsError(ErrorKind::corruption, "an object that maps names to tensors"));
}

TEST_F(SafetensorsTest, TheCacheOfHuggingFaceIsRead) {
  std::filesystem::create_directories(tmp_ / "models--x/blobs");
  std::filesystem::create_directories(tmp_ / "models--x/snapshots/abc");
  std::filesystem::copy_file(fixture("safetensors/valid/single.safetensors"),
                             tmp_ / "models--x/blobs/0123");
  std::filesystem::create_symlink("../../blobs/0123",
                                  tmp_ / "models--x/snapshots/abc/model.safetensors");
  test::expect_holds(*open(tmp_ / "models--x/snapshots/abc"),
                     fixture("safetensors/valid/single.safetensors.expect.json"));
}

TEST_F(SafetensorsTest, AnIndexThatIsHdf5IsNamedAsHdf5) {
  std::filesystem::create_directory(tmp_ / "d");
  put("d/model.safetensors.index.json",
      std::string("\x89HDF\r\n\x1a\n", 8) + std::string(600, '\0'));
  EXPECT_THAT([&] { open(tmp_ / "d"); },
              ThrowsError(ErrorKind::corruption, "expected a JSON object, found an HDF5 file"));
}

TEST_F(SafetensorsTest, TextsOfAnIndexAreThoseOfTheCheckpoint) {
  std::filesystem::create_directory(tmp_ / "d");
  put_safetensors("d/one.safetensors", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1);
  put("d/model.safetensors.index.json",
      R"({"metadata":{"total_size":1,"note":"mine","epoch":7,"total_parameters":1},)"
      R"("weight_map":{"a":"one.safetensors"}})");
  const std::map<std::string, std::string> texts{{"note", "mine"}, {"epoch", "7"}};
  EXPECT_EQ(open(tmp_ / "d")->contents().annotations, texts);
}

TEST_F(SafetensorsTest, AModelInOneFileBesideAnIndexIsRefused) {
  std::filesystem::create_directory(tmp_ / "d");
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  put_safetensors("d/model-00001-of-00001.safetensors", header, 1);
  put_safetensors("d/model.safetensors", header, 1);
  put("d/model.safetensors.index.json",
      R"({"weight_map":{"a":"model-00001-of-00001.safetensors"}})");
  EXPECT_THAT([&] { open(tmp_ / "d"); },
              ThrowsError(ErrorKind::invalid_argument,
                          "models: expected the files of one model, found 'model.safetensors' and "
                          "'model.safetensors.index.json', which does not name that file"));
  EXPECT_EQ(open(tmp_ / "d/model.safetensors")->contents().tensors.size(), 1U);
  EXPECT_EQ(open(tmp_ / "d/model.safetensors.index.json")->contents().tensors.size(), 1U);
  std::filesystem::remove(tmp_ / "d/model.safetensors.index.json");
  put("d/model.safetensors.index.json", R"({"weight_map":{"a":"model.safetensors"}})");
  EXPECT_EQ(open(tmp_ / "d")->contents().tensors.size(), 1U);
}

TEST_F(SafetensorsTest, TextsOfAnIndexAreNoAliases) {
  std::filesystem::create_directory(tmp_ / "d");
  put_safetensors("d/one.safetensors",
                  R"({"__metadata__":{"tied":"a"},)"
                  R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1);
  put("d/model.safetensors.index.json",
      R"({"metadata":{"base_layer":"a"},"weight_map":{"a":"one.safetensors"}})");
  const auto reader = open(tmp_ / "d");
  ASSERT_EQ(reader->contents().aliases.size(), 1U);
  EXPECT_EQ(reader->contents().aliases[0].fqn, "tied");
  EXPECT_EQ(reader->contents().annotations.at("base_layer"), "a");
}

TEST_F(SafetensorsTest, FilesOfTwoCheckpointsInOneDirectoryAreRefused) {
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  put_safetensors("one.safetensors", header, 1);
  put_safetensors("two.safetensors", header, 1);
  EXPECT_THAT(
      [&] { open(tmp_.path()); },
      ThrowsError(
          ErrorKind::corruption,
          "two.safetensors: a: names: expected each tensor in one file, found this tensor "
          "also in 'one.safetensors' (are these files of different checkpoints, or variants "
          "of one such as fp16? To read one of them, give the file itself)"));
  EXPECT_EQ(open(tmp_ / "two.safetensors")->contents().tensors.size(), 1U);
}

TEST_F(SafetensorsTest, ADirectoryWithoutSafetensorsIsNotFound) {
  EXPECT_THAT([&] { open(tmp_.path()); }, ThrowsError(ErrorKind::not_found, "neither"));
  EXPECT_THAT([&] { open(tmp_ / "none"); }, ThrowsError(ErrorKind::not_found, "none"));
}

TEST_F(SafetensorsTest, EverythingComesBackFromOneFile) {
  write(make_rich_checkpoint(), "a.safetensors");
  EXPECT_THAT(fs_.list_directory(tmp_.path()),
              ElementsAre("a.safetensors", "a.safetensors.values.json"));
  expect_rich_checkpoint(*open(tmp_ / "a.safetensors"));
}

TEST_F(SafetensorsTest, EverythingComesBackFromADirectory) {
  write(make_rich_checkpoint(), "a");
  EXPECT_THAT(fs_.list_directory(tmp_ / "a"),
              ElementsAre("model.safetensors", "model.safetensors.values.json"));
  expect_rich_checkpoint(*open(tmp_ / "a"));
}

TEST_F(SafetensorsTest, EverythingComesBackFromShards) {
  write(make_rich_checkpoint(), "a", {.max_shard_nbytes = 16});
  EXPECT_THAT(fs_.list_directory(tmp_ / "a"),
              ElementsAre("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                          "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors",
                          "model.safetensors.index.json", "model.safetensors.values.json"));
  expect_rich_checkpoint(*open(tmp_ / "a"));
  EXPECT_EQ(*parse_json(text("a/model.safetensors.index.json"), "index")
                 .find("metadata")
                 ->find("total_size"),
            Value(12 + 3 + 8 + 4 + 24 + 8));
}

TEST_F(SafetensorsTest, TheHeaderIsPaddedAndEveryTensorAligned) {
  write(make_rich_checkpoint(), "a.safetensors");
  const std::string bytes = text("a.safetensors");
  EXPECT_EQ(static_cast<unsigned char>(bytes[0]) % 8, 0);
  const auto reader = open(tmp_ / "a.safetensors");
  for (std::size_t i = 0; i < reader->contents().tensors.size(); ++i) {
    const auto storage = reader->piece_storage(i, 0);
    EXPECT_EQ(storage.byte_range->begin % itemsize(reader->contents().tensors[i].meta.dtype), 0U);
  }
}

TEST_F(SafetensorsTest, AnEmptyCheckpointIsOneFileWithoutTensors) {
  write(MemoryCheckpoint(), "a.safetensors");
  EXPECT_THAT(open(tmp_ / "a.safetensors")->contents().tensors, ::testing::IsEmpty());
  EXPECT_EQ(text("a.safetensors").substr(8), R"({"__metadata__":{"format":"pt"}})");
}

TEST_F(SafetensorsTest, WhatItCannotHoldIsListedInOneRefusal) {
  MemoryCheckpoint source;
  source.add({"a", DType::complex128, {1}}, test::Bytes(16));
  source.add({"b", DType::complex32, {1}}, test::Bytes(4));
  source.add({"c", DType::complex128, {1}}, test::Bytes(16));
  source.add({"d", DType::float32, {1}}, test::Bytes(4));
  source.add({"e\xff", DType::float32, {1}}, test::Bytes(4));
  EXPECT_THAT(
      [&] { write(source, "a.safetensors"); },
      ThrowsError(ErrorKind::unsupported,
                  "a.safetensors: tensors: expected dtypes and names that safetensors can hold, "
                  "found complex128: a, c; complex32: b; name that is not UTF-8: e\\xff"));
  EXPECT_THAT(fs_.list_directory(tmp_.path()), ::testing::IsEmpty());
}

TEST_F(SafetensorsTest, ShardedTensorsAndSeveralFilesForOneNameAreRefused) {
  MemoryCheckpoint source;
  source.add({"a", DType::uint8, {2}}, test::Bytes(2), {{Box{{0}, {1}}, 0}, {Box{{1}, {1}}, 1}});
  EXPECT_THAT([&] { write(source, "a.safetensors"); },
              ThrowsError(ErrorKind::invalid_argument, "a: pieces: expected one"));
  EXPECT_THAT([&] { write(make_rich_checkpoint(), "a.safetensors", {.max_shard_nbytes = 16}); },
              ThrowsError(ErrorKind::invalid_argument, "give the path of a directory"));
}

TEST_F(SafetensorsTest, ValuesOfOtherTensorsAreRefusedAndStrayOnesIgnored) {
  write(make_rich_checkpoint(), "a.safetensors");
  MemoryCheckpoint other;
  other.add({"x", DType::uint8, {1}}, test::Bytes(1));
  write(other, "plain.safetensors");
  std::filesystem::copy_file(tmp_ / "a.safetensors.values.json",
                             tmp_ / "plain.safetensors.values.json");
  EXPECT_THAT(open(tmp_ / "plain.safetensors")->contents().values, ::testing::IsEmpty());

  other.add_value("x", 1);
  EXPECT_THAT([&] { write(other, "plain.safetensors", {}, OverwritePolicy::refuse); },
              ThrowsError(ErrorKind::already_exists, "plain.safetensors"));
  std::filesystem::copy_file(tmp_ / "a.safetensors", tmp_ / "plain.safetensors",
                             std::filesystem::copy_options::overwrite_existing);
  write(other, "b.safetensors");
  std::filesystem::copy_file(tmp_ / "b.safetensors.values.json",
                             tmp_ / "plain.safetensors.values.json",
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT([&] { open(tmp_ / "plain.safetensors"); },
              ThrowsError(ErrorKind::corruption, "plain.safetensors.values.json: checksum"));
}

std::vector<std::string> notes_told(const CheckpointReader& reader) {
  std::vector<std::string> lines;
  for (const Finding& finding : reader.contents().opening_findings) {
    lines.push_back((finding.severity == Finding::Severity::error ? "error: " : "note: ") +
                    last_component(finding.where.path) + ": " + finding.rule + ": " +
                    finding.found);
  }
  return lines;
}

TEST_F(SafetensorsTest, AValuesFileThatNothingNamesIsTold) {
  write(make_rich_checkpoint(), "a.safetensors");
  EXPECT_THAT(notes_told(*open(tmp_ / "a.safetensors")), ::testing::IsEmpty());
  // Another library that saves the tensors again drops their __metadata__.
  put_safetensors("again.safetensors", R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1);
  std::filesystem::rename(tmp_ / "again.safetensors", tmp_ / "a.safetensors");
  const auto reader = open(tmp_ / "a.safetensors");
  EXPECT_THAT(notes_told(*reader),
              ElementsAre(HasSubstr("note: a.safetensors.values.json: values: none")));
  std::vector<std::string> found;
  reader->check_files([&](const Finding& finding) { found.push_back(finding.where.path); });
  EXPECT_THAT(found, ElementsAre(HasSubstr("a.safetensors.values.json")));
}

// Another program may write an index beside the files.
TEST_F(SafetensorsTest, AnIndexWithoutValuesLeavesThoseThatTheHeaderNames) {
  std::filesystem::create_directory(tmp_ / "d");
  const MemoryCheckpoint source = make_rich_checkpoint();
  write(source, "d/rich.safetensors");
  std::string weight_map;
  for (const TensorEntry& tensor : source.contents().tensors) {
    weight_map += (weight_map.empty() ? "\"" : ",\"") + tensor.meta.fqn + R"(":"rich.safetensors")";
  }
  put("d/model.safetensors.index.json", R"({"weight_map":{)" + weight_map + "}}");
  for (const std::string path : {"d", "d/model.safetensors.index.json"}) {
    const auto reader = open(tmp_ / path);
    EXPECT_THAT(notes_told(*reader), ::testing::IsEmpty());
    expect_rich_checkpoint(*reader);
  }
}

TEST_F(SafetensorsTest, AnIndexWithoutKeyPathsLeavesThoseOfTheHeaders) {
  std::filesystem::create_directory(tmp_ / "d");
  write(make_nested_checkpoint(), "d/a.safetensors");
  put("d/model.safetensors.index.json",
      R"({"weight_map":{"model.x":"a.safetensors","model.y":"a.safetensors"}})");
  expect_nested_checkpoint(*open(tmp_ / "d"));
}

TEST_F(SafetensorsTest, ShardsWithoutTheirIndexTellOfTheirValues) {
  write(make_rich_checkpoint(), "c", {.max_shard_nbytes = 1});
  fs_.remove_all(tmp_ / "c/model.safetensors.index.json");
  EXPECT_THAT(notes_told(*open(tmp_ / "c")),
              ElementsAre(HasSubstr("error: model.safetensors.index.json: structure: none")));
  fs_.remove_all(tmp_ / "c/model.safetensors.values.json");
  EXPECT_THAT(notes_told(*open(tmp_ / "c")), ElementsAre(HasSubstr("note: c: structure: none")));
}

TEST_F(SafetensorsTest, TextsThatDifferBetweenFilesAreTold) {
  std::filesystem::create_directory(tmp_ / "two");
  for (const std::string name : {"a", "b"}) {
    put_safetensors("two/" + name + ".safetensors",
                    R"({"__metadata__":{"format":"pt","by":"who )" + name + R"("},")" + name +
                        R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                    1);
  }
  const auto reader = open(tmp_ / "two");
  EXPECT_EQ(reader->contents().annotations.at("by"), "who a");
  EXPECT_THAT(
      notes_told(*reader),
      ElementsAre(HasSubstr("note: two: __metadata__: different texts for 'by'"),
                  HasSubstr("note: two: structure: none (2 files are read as one checkpoint: "
                            "a.safetensors, b.safetensors)")));
}

TEST_F(SafetensorsTest, TextsUnderReservedKeysThatDifferAreTold) {
  std::filesystem::create_directory(tmp_ / "two");
  for (const std::string name : {"a", "b"}) {
    put_safetensors("two/" + name + ".safetensors",
                    R"({"__metadata__":{"tessera.texts":"{\"by\":\"who )" + name + R"(\"}"},")" +
                        name + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                    1);
  }
  const auto reader = open(tmp_ / "two");
  EXPECT_EQ(reader->contents().annotations.at("by"), "who a");
  EXPECT_THAT(notes_told(*reader), ::testing::Contains(HasSubstr("different texts for 'by'")));
}

TEST_F(SafetensorsTest, FieldsThatNobodyReadsAreTold) {
  put_safetensors("a.safetensors",
                  R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"zero":{"dtype":[1]}}})",
                  1);
  EXPECT_THAT(notes_told(*open(tmp_ / "a.safetensors")),
              ElementsAre(HasSubstr("note: a.safetensors: header: also zero (not read")));
}

// The two models may have different tensor names, so equal names cannot detect them.
TEST_F(SafetensorsTest, ASecondModelOfAccelerateNeedsAName) {
  std::filesystem::create_directory(tmp_ / "models");
  put_safetensors("models/model.safetensors",
                  R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  put_safetensors("models/model_1.safetensors",
                  R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  EXPECT_THAT([&] { open(tmp_ / "models"); },
              ThrowsError(ErrorKind::invalid_argument,
                          "found 'model.safetensors' and 'model_1.safetensors', as accelerate"));
  EXPECT_EQ(open(tmp_ / "models/model_1.safetensors")->contents().tensors[0].meta.fqn, "b");
}

TEST_F(SafetensorsTest, AnAdapterBesideAModelNeedsAName) {
  std::filesystem::create_directory(tmp_ / "models");
  put_safetensors("models/adapter_model.safetensors",
                  R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  EXPECT_EQ(open(tmp_ / "models")->contents().tensors[0].meta.fqn, "a");
  put_safetensors("models/model.safetensors",
                  R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  EXPECT_THAT([&] { open(tmp_ / "models"); },
              ThrowsError(ErrorKind::invalid_argument,
                          "'model.safetensors' and 'adapter_model.safetensors', a model and an "
                          "adapter (move the adapter to a folder of its own"));
}

TEST_F(SafetensorsTest, AnAdapterIsNotJoinedWithAModelInSeveralFiles) {
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  for (const char* model : {"model-00001-of-00001.safetensors", "pytorch_model.bin",
                            "pytorch_model-00001-of-00001.bin"}) {
    const test::TemporaryDirectory folder;
    for (const char* name : {"adapter_model.safetensors", model}) {
      put_safetensors(name, header, 1);
      std::filesystem::rename(tmp_ / name, folder / name);
    }
    EXPECT_THAT([&] { open(folder.path()); },
                ThrowsError(ErrorKind::invalid_argument,
                            std::string("'") + model + "' and 'adapter_model.safetensors'"));
  }
}

TEST_F(SafetensorsTest, ATensorInTwoFilesIsTold) {
  std::filesystem::create_directory(tmp_ / "two");
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  put_safetensors("two/one.safetensors", header, 1);
  put_safetensors("two/two.safetensors",
                  R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                  R"("b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                  2);
  put("two/model.safetensors.index.json",
      R"({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})");
  EXPECT_THAT(
      notes_told(*open(tmp_ / "two")),
      ElementsAre(HasSubstr("note: two: structure: 1 second copy: 'a' in two.safetensors")));
}

TEST_F(SafetensorsTest, WhatAnIndexSaysWronglyOrBesideTheFilesIsTold) {
  std::filesystem::create_directory(tmp_ / "d");
  put_safetensors("d/one.safetensors",
                  R"({"__metadata__":{"format":"pt","b":"a"},)"
                  R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                  R"("unlisted":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}})",
                  9);
  const auto lines = [&](const std::string& members) {
    fs_.remove_all(tmp_ / "d/model.safetensors.index.json");
    put("d/model.safetensors.index.json",
        "{" + members + R"("weight_map":{"a":"one.safetensors"}})");
    std::vector<std::string> of_verify;
    const auto reader = open(tmp_ / "d");
    reader->check_files([&](const Finding& finding) { of_verify.push_back(finding.found); });
    for (const Finding& finding : reader->contents().opening_findings) {
      EXPECT_THAT(of_verify, ::testing::Contains(finding.found));
    }
    return notes_told(*reader);
  };
  // `a` has 8 bytes, the unlisted tensor 1; `b`, the second name of `a`, may count 8 more.
  for (const std::string number : {"8", "9", "16", "17", "8.0"}) {
    EXPECT_THAT(lines(R"("metadata":{"total_size":)" + number + "},"), ::testing::IsEmpty());
  }
  for (const std::string wrong : {"7", "-8", "1e30", "'8'", "null"}) {
    std::string json = wrong;
    std::ranges::replace(json, '\'', '"');
    EXPECT_THAT(lines(R"("metadata":{"total_size":)" + json + "},"),
                ElementsAre(HasSubstr("note: model.safetensors.index.json: structure: ")));
  }
  EXPECT_THAT(lines(R"("metadata":["x"],"by":{"x":1},"at":2,)"),
              ElementsAre(HasSubstr("structure: 'metadata', which is no object, 'by', 'at' (not")));
  EXPECT_THAT(lines(""), ::testing::IsEmpty());
}

TEST_F(SafetensorsTest, TextUnderReservedKeysIsKept) {
  const std::map<std::string, std::string> texts{
      {"DCP_VERSION", "mine"}, {"tessera.aliases", "mine"}, {"tessera.mine", "text"}};
  put_safetensors("a.safetensors",
                  R"({"__metadata__":{"DCP_VERSION":"mine","tessera.mine":"text"},)"
                  R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1);
  EXPECT_EQ(open(tmp_ / "a.safetensors")->contents().annotations.at("DCP_VERSION"), "mine");
  EXPECT_EQ(open(tmp_ / "a.safetensors")->contents().annotations.at("tessera.mine"), "text");
  MemoryCheckpoint source = make_rich_checkpoint();
  source.contents_for_change().annotations = texts;
  write(source, "b.safetensors");
  write(source, "c", {.max_shard_nbytes = 1});
  for (const std::string name : {"b.safetensors", "c"}) {
    const auto reader = open(tmp_ / name);
    EXPECT_THAT(notes_told(*reader), ::testing::IsEmpty());
    EXPECT_EQ(reader->contents().aliases.size(), 1U);
    for (const auto& [key, text] : texts) {
      const auto found = reader->contents().annotations.find(key);
      ASSERT_NE(found, reader->contents().annotations.end()) << key;
      EXPECT_EQ(found->second, text);
    }
  }
}

TEST_F(SafetensorsTest, AnIndexHasNamesWithADollarAsTheyAre) {
  MemoryCheckpoint source;
  source.add({"$w", DType::float32, {2}}, bytes_of<float>({1, 2}));
  source.add({"a", DType::float32, {2}}, bytes_of<float>({3, 4}));
  write(source, "c", {.max_shard_nbytes = 8});
  EXPECT_THAT(text("c/model.safetensors.index.json"),
              HasSubstr(R"("$w": "model-00001-of-00002.safetensors")"));
  EXPECT_EQ(open(tmp_ / "c")->contents().tensors.size(), 2U);
}

TEST_F(SafetensorsTest, TensorsWithoutValuesNeedNoSecondFile) {
  write(make_nested_checkpoint(), "a.safetensors");
  write(make_nested_checkpoint(), "b");
  write(make_nested_checkpoint(), "c", {.max_shard_nbytes = 1});
  EXPECT_THAT(fs_.list_directory(tmp_.path()), ElementsAre("a.safetensors", "b", "c"));
  EXPECT_THAT(fs_.list_directory(tmp_ / "b"), ElementsAre("model.safetensors"));
  EXPECT_THAT(fs_.list_directory(tmp_ / "c"),
              ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                          "model.safetensors.index.json"));
  for (const char* name : {"a.safetensors", "b", "c"}) {
    SCOPED_TRACE(name);
    expect_nested_checkpoint(*open(tmp_ / name));
  }
}

TEST_F(SafetensorsTest, TopLevelNamesNeedNoKeyPaths) {
  MemoryCheckpoint source;
  source.add({"a.b", DType::uint8, {1}}, test::Bytes(1)).key_path = {"a.b"};
  write(source, "a.safetensors");
  EXPECT_THAT(fs_.list_directory(tmp_.path()), ElementsAre("a.safetensors"));
  EXPECT_EQ(text("a.safetensors").find("tessera"), std::string::npos);
}

TEST_F(SafetensorsTest, FilesOfOneDirectoryEachSayTheirOwn) {
  std::filesystem::create_directory(tmp_ / "two");
  write(make_nested_checkpoint(), "two/a.safetensors");
  MemoryCheckpoint other;
  other.add({"net.z", DType::uint8, {1}}, test::Bytes(1)).key_path = {"net", "z"};
  write(other, "two/b.safetensors");
  const auto reader = open(tmp_ / "two");
  ASSERT_EQ(reader->contents().tensors.size(), 3U);
  EXPECT_EQ(reader->contents().tensors[1].key_path, (KeyPath{"model", "y"}));
  EXPECT_EQ(reader->contents().tensors[2].key_path, (KeyPath{"net", "z"}));
  EXPECT_EQ(reader->contents().units.size(), 1U);
}

TEST_F(SafetensorsTest, KeyPathsAloneInASecondFileAreRead) {
  const std::string values =
      R"({"schema":1,"values":{},"key_paths":{"model.x":["model","x"]},"kinds":{},)"
      R"("parameters":{},"units":[]})";
  put_safetensors("a.safetensors",
                  R"({"__metadata__":{"format":"pt","tessera.values":")" + digest_of(values) +
                      R"("},"model.x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1);
  put("a.safetensors.values.json", values);
  EXPECT_EQ(open(tmp_ / "a.safetensors")->contents().tensors[0].key_path, (KeyPath{"model", "x"}));
}

TEST_F(SafetensorsTest, MalformedStructureIsRefused) {
  for (const std::string broken :
       {"", "[]", R"({\"schema\":2})", R"({\"schema\":1,\"values\":{\"v\":1}})",
        R"({\"schema\":1,\"key_paths\":{\"none\":[\"none\"]}})"}) {
    if (fs_.kind_of(tmp_ / "a.safetensors")) fs_.remove_all(tmp_ / "a.safetensors");
    put_safetensors("a.safetensors",
                    R"({"__metadata__":{"tessera.structure":")" + broken + R"("}})", 0);
    EXPECT_THROW(open(tmp_ / "a.safetensors"), Error);
  }
}

TEST_F(SafetensorsTest, ValuesAsDeepAsReadersGiveThemComeBack) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {1}}, bytes_of<float>({1}));
  Value deep = std::int64_t{1};
  for (int i = 0; i < 64; ++i) {
    deep = i % 2 == 0 ? Value(Value::Tuple{{deep}})
                      : Value(Value::Dict{{std::int64_t{1}, std::move(deep)}});
  }
  source.add_value("deep", deep);
  write(source, "a.safetensors");
  EXPECT_EQ(open(tmp_ / "a.safetensors")->read_value(0), deep);
}

TEST_F(SafetensorsTest, TextThatHappensToBeATensorsNameStaysText) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {1}}, bytes_of<float>({1}));
  source.contents_for_change().annotations = {{"best", "w"}};
  write(source, "a.safetensors");
  const auto reader = open(tmp_ / "a.safetensors");
  EXPECT_TRUE(reader->contents().aliases.empty());
  EXPECT_EQ(reader->contents().annotations.at("best"), "w");
  for (const std::string texts : {"[]", R"({\"a\":1})"}) {
    if (fs_.kind_of(tmp_ / "b.safetensors")) fs_.remove_all(tmp_ / "b.safetensors");
    put_safetensors("b.safetensors", R"({"__metadata__":{"tessera.texts":")" + texts + R"("}})", 0);
    EXPECT_THAT([&] { open(tmp_ / "b.safetensors"); },
                ThrowsError(ErrorKind::corruption, "tessera.texts"));
  }
}

TEST_F(SafetensorsTest, ADirectoryOfSeveralFilesWithValuesOfTheirOwnIsRefused) {
  std::filesystem::create_directory(tmp_ / "two");
  write(make_rich_checkpoint(), "two/a.safetensors");
  put_safetensors("two/b.safetensors",
                  R"({"other":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  EXPECT_THAT([&] { open(tmp_ / "two"); },
              ThrowsError(ErrorKind::unsupported, "give the path of one file"));
}

TEST_F(SafetensorsTest, MissingValuesAreFoundByVerify) {
  write(make_rich_checkpoint(), "a.safetensors");
  fs_.remove_all(tmp_ / "a.safetensors.values.json");
  const auto reader = open(tmp_ / "a.safetensors");
  EXPECT_THAT(reader->contents().missing_files,
              ElementsAre(HasSubstr("a.safetensors.values.json")));
  std::vector<Finding> errors;
  std::uint64_t num_read = 0;
  reader->verify(
      [&](const Finding& finding) {
        if (finding.severity == Finding::Severity::error) errors.push_back(finding);
      },
      [&](std::uint64_t nbytes) { num_read += nbytes; });
  ASSERT_EQ(errors.size(), 1U);
  EXPECT_THAT(errors[0].where.path, HasSubstr("a.safetensors.values.json"));
  EXPECT_EQ(num_read, 12U + 3 + 8 + 4 + 24 + 8);
}

TEST_F(SafetensorsTest, MalformedValuesFilesAreRefused) {
  for (const std::string broken :
       {R"({"values":{}})", R"({"schema":1,"values":[]})", R"({"schema":1,"values":{"x":1}})",
        R"({"schema":1,"key_paths":{"x":[1.5]}})", R"({"schema":1,"key_paths":{"x":[["x"]]}})",
        R"({"schema":1,"key_paths":{"x":[[[1]]]}})", R"({"schema":1,"key_paths":{"none":[]}})",
        R"({"schema":1,"kinds":{"x":"sparse"}})", R"({"schema":1,"parameters":{"x":1}})",
        R"({"schema":1,"values":{"$dict":[["v",1],["v",2]]}})", R"({"schema":1,"units":[{}]})",
        R"({"schema":1,"units":[{"name":"u","dtype":"uint8","parameters":)"
        R"([{"fqn":"x","shape":[-1],"offset":0}]}]})",
        R"({"schema":1,"units":[{"name":"u","dtype":"uint8","parameters":)"
        R"([{"fqn":"x","shape":[4],"offset":0},{"fqn":"y","shape":[4],"offset":3}]}]})"}) {
    SCOPED_TRACE(broken);
    test::TemporaryDirectory folder;
    MemoryCheckpoint source;
    source.add({"x", DType::uint8, {1}}, test::Bytes(1));
    source.add_value("v", 1);
    const auto writer =
        create_safetensors(fs_, folder / "a.safetensors", source.contents(), {Value(1)});
    test::copy_checkpoint(source, *writer);
    // Forge the digest along with the values.
    const std::string values = read_file(fs_, folder / "a.safetensors.values.json", 1 << 20);
    std::string tensors = read_file(fs_, folder / "a.safetensors", 1 << 20);
    const std::size_t at = tensors.find(digest_of(values));
    ASSERT_NE(at, std::string::npos);
    tensors.replace(at, 16, digest_of(broken));
    fs_.open_for_update(folder / "a.safetensors")->write_at(0, std::as_bytes(std::span(tensors)));
    fs_.remove_all(folder / "a.safetensors.values.json");
    const auto file = fs_.create(folder / "a.safetensors.values.json");
    file->write_at(0, std::as_bytes(std::span(broken)));
    file->close();
    EXPECT_THAT([&] { open(folder / "a.safetensors"); },
                ThrowsError(ErrorKind::corruption, "a.safetensors.values.json: "));
  }
}

TEST_F(SafetensorsTest, ValuesThatAWriterHadReplacedWhenItDiedAreRead) {
  MemoryCheckpoint old;
  old.add({"x", DType::uint8, {1}}, bytes_of<std::uint8_t>({7}));
  old.add_value("v", "old");
  write(old, "a.safetensors");
  write(make_rich_checkpoint(), "b.safetensors");
  std::filesystem::rename(tmp_ / "a.safetensors.values.json",
                          tmp_ / "a.safetensors.values.json.partial");
  std::filesystem::copy_file(tmp_ / "b.safetensors.values.json",
                             tmp_ / "a.safetensors.values.json");
  EXPECT_EQ(open(tmp_ / "a.safetensors")->read_value(0), Value("old"));
  // The first two steps of an exchange in steps.
  std::filesystem::rename(tmp_ / "a.safetensors.values.json.partial",
                          tmp_ / "a.safetensors.values.json.partial.old");
  EXPECT_EQ(open(tmp_ / "a.safetensors")->read_value(0), Value("old"));
  std::filesystem::rename(tmp_ / "a.safetensors.values.json",
                          tmp_ / "a.safetensors.values.json.partial");
  EXPECT_EQ(open(tmp_ / "a.safetensors")->read_value(0), Value("old"));
  // A writer that does not commit leaves them unchanged.
  for (const bool has_values : {true, false}) {
    const MemoryCheckpoint source = has_values ? make_rich_checkpoint() : MemoryCheckpoint();
    create_safetensors(fs_, tmp_ / "a.safetensors", source.contents(), values_of(source),
                       OverwritePolicy::replace);
    EXPECT_EQ(open(tmp_ / "a.safetensors")->read_value(0), Value("old"));
  }
}

TEST_F(SafetensorsTest, AFileThatTakesThePlaceOfAnOpenOneGivesNoNumbers) {
  MemoryCheckpoint first;
  first.add({"x", DType::uint8, {1}}, bytes_of<std::uint8_t>({7}));
  write(first, "a.safetensors");
  put_safetensors("b.safetensors", R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  const auto reader = open(tmp_ / "a.safetensors");
  std::filesystem::rename(tmp_ / "b.safetensors", tmp_ / "a.safetensors");
  std::byte byte{};
  reader->read_piece(0, 0, {0, 1}, {&byte, 1});
  EXPECT_EQ(byte, std::byte{7});
}

TEST_F(SafetensorsTest, NothingIsLeftOfValuesThatNobodyNames) {
  write(make_rich_checkpoint(), "a.safetensors");
  std::filesystem::copy_file(tmp_ / "a.safetensors.values.json",
                             tmp_ / "a.safetensors.values.json.partial");
  MemoryCheckpoint plain;
  plain.add({"x", DType::uint8, {1}}, bytes_of<std::uint8_t>({7}));
  write(plain, "a.safetensors", {}, OverwritePolicy::replace);
  EXPECT_THAT(fs_.list_directory(tmp_.path()), ::testing::ElementsAre("a.safetensors"));
}

TEST_F(SafetensorsTest, ReplacingKeepsTensorsAndValuesTogetherWhateverFails) {
  MemoryCheckpoint old;
  old.add({"x", DType::uint8, {1}}, bytes_of<std::uint8_t>({7}));
  old.add_value("v", "old");
  bool succeeded = false;
  for (std::int64_t i = 0; !succeeded; ++i) {
    SCOPED_TRACE("operation " + std::to_string(i));
    ASSERT_LT(i, 200);
    write(old, "a.safetensors", {}, OverwritePolicy::replace);
    test::FaultFileSystem faulty(fs_, tmp_.path());
    faulty.fail_operation(i);
    try {
      const MemoryCheckpoint source = make_rich_checkpoint();
      const auto writer = create_safetensors(faulty, tmp_ / "a.safetensors", source.contents(),
                                             values_of(source), OverwritePolicy::replace);
      test::copy_checkpoint(source, *writer, 1);
      succeeded = true;
      expect_rich_checkpoint(*open(tmp_ / "a.safetensors"));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io);
      const auto reader = open(tmp_ / "a.safetensors");
      ASSERT_EQ(reader->contents().values.size(), 1U);
      EXPECT_EQ(reader->read_value(0), Value("old"));
    }
  }
}

TEST_F(SafetensorsTest, ASingleFileAppearsAfterItsValues) {
  test::FaultFileSystem watched(fs_, tmp_.path());
  MemoryCheckpoint source;
  source.add({"x", DType::uint8, {1}}, test::Bytes(1));
  const auto writer = create_safetensors(watched, tmp_ / "a.safetensors", source.contents(), {});
  test::copy_checkpoint(source, *writer);
  EXPECT_EQ(watched.transcript(),
            "create a.safetensors.partial\n"
            "close a.safetensors.partial\n"
            "create a.safetensors.partial.journal\n"
            "write a.safetensors.partial.journal [0, 18)\n"
            "close a.safetensors.partial.journal\n"
            "open_for_update a.safetensors.partial\n"
            "write a.safetensors.partial [0, 96)\n"
            "resize a.safetensors.partial 97\n"
            "close a.safetensors.partial\n"
            "open_for_update a.safetensors.partial\n"
            "write a.safetensors.partial [96, 97)\n"
            "sync a.safetensors.partial\n"
            "close a.safetensors.partial\n"
            "rename a.safetensors.partial a.safetensors\n"
            "sync_directory .\n"
            "remove_all a.safetensors.partial.journal\n");

  watched.fail_operation(-1);
  source.add_value("v", 1);
  const auto with_values =
      create_safetensors(watched, tmp_ / "b.safetensors", source.contents(), {Value(1)});
  test::copy_checkpoint(source, *with_values);
  EXPECT_THAT(watched.transcript(),
              ::testing::EndsWith("sync b.safetensors.values.json.partial\n"
                                  "close b.safetensors.values.json.partial\n"
                                  "rename b.safetensors.values.json.partial "
                                  "b.safetensors.values.json\n"
                                  "sync_directory .\n"
                                  "rename b.safetensors.partial b.safetensors\n"
                                  "sync_directory .\n"
                                  "remove_all b.safetensors.partial.journal\n"));
}

TEST_F(SafetensorsTest, ShardsAndTheirIndexAppearInOneRename) {
  test::FaultFileSystem watched(fs_, tmp_.path());
  MemoryCheckpoint source;
  source.add({"x", DType::uint8, {8}}, test::Bytes(8));
  source.add({"y", DType::uint8, {8}}, test::Bytes(8));
  source.add_value("v", 1);
  const auto writer = create_safetensors(watched, tmp_ / "shards", source.contents(), {Value(1)},
                                         OverwritePolicy::refuse, {.max_shard_nbytes = 8});
  test::copy_checkpoint(source, *writer);
  EXPECT_EQ(watched.transcript(),
            "make_directory shards.partial\n"
            "create shards.partial.journal\n"
            "write shards.partial.journal [0, 18)\n"
            "close shards.partial.journal\n"
            "create shards.partial/model-00001-of-00002.safetensors\n"
            "write shards.partial/model-00001-of-00002.safetensors [0, 96)\n"
            "resize shards.partial/model-00001-of-00002.safetensors 104\n"
            "close shards.partial/model-00001-of-00002.safetensors\n"
            "create shards.partial/model-00002-of-00002.safetensors\n"
            "write shards.partial/model-00002-of-00002.safetensors [0, 96)\n"
            "resize shards.partial/model-00002-of-00002.safetensors 104\n"
            "close shards.partial/model-00002-of-00002.safetensors\n"
            "open_for_update shards.partial/model-00001-of-00002.safetensors\n"
            "write shards.partial/model-00001-of-00002.safetensors [96, 104)\n"
            "sync shards.partial/model-00001-of-00002.safetensors\n"
            "close shards.partial/model-00001-of-00002.safetensors\n"
            "open_for_update shards.partial/model-00002-of-00002.safetensors\n"
            "write shards.partial/model-00002-of-00002.safetensors [96, 104)\n"
            "sync shards.partial/model-00002-of-00002.safetensors\n"
            "close shards.partial/model-00002-of-00002.safetensors\n"
            "create shards.partial/model.safetensors.values.json\n"
            "write shards.partial/model.safetensors.values.json [0, 117)\n"
            "sync shards.partial/model.safetensors.values.json\n"
            "close shards.partial/model.safetensors.values.json\n"
            "create shards.partial/model.safetensors.index.json\n"
            "write shards.partial/model.safetensors.index.json [0, 199)\n"
            "sync shards.partial/model.safetensors.index.json\n"
            "close shards.partial/model.safetensors.index.json\n"
            "sync_directory shards.partial\n"
            "rename shards.partial shards\n"
            "sync_directory .\n"
            "remove_all shards.partial.journal\n");
}

}  // namespace
}  // namespace tessera::formats
