#include "formats/megatron/torch_dist_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "support/copy_checkpoint.h"
#include "support/memory_checkpoint.h"
#include "support/temporary_directory.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"

namespace tessera::formats {
namespace {

using test::bytes_of;
using test::MemoryCheckpoint;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
namespace stdfs = std::filesystem;

/// A folder that `--to megatron` wrote, which tests damage.
class TorchDistFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    MemoryCheckpoint source("model");
    source.add({"decoder.layers.0.mlp.linear_fc1.weight", DType::float32, {2}},
               bytes_of<float>({1, 2}));
    source.add_value("iteration", Value(std::int64_t{7}));
    write(source, Format("megatron"));
  }
  void write(const MemoryCheckpoint& source, Format format) {
    stdfs::remove_all(path());
    std::vector<Value> values;
    for (std::size_t v = 0; v < source.contents().values.size(); ++v) {
      values.push_back(source.read_value(v));
    }
    const auto writer = create_checkpoint(fs_, path(), source.contents(), std::move(values),
                                          {.format = std::move(format)});
    test::copy_checkpoint(source, *writer);
  }

  std::string path() const { return tmp_ / "run"; }
  std::string file(const std::string& name) const { return path() + "/" + name; }
  void replace(const std::string& name, const std::string& content) {
    std::ofstream(file(name), std::ios::binary) << content;
  }
  std::string content(const std::string& name) const {
    std::ifstream in(file(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  /// Returns what all parts of a check find, as `file: severity rule: <expected>, found …`.
  std::vector<std::string> findings(int num_parts = 1) const {
    std::vector<std::string> found;
    const auto reader = open_checkpoint(fs_, path());
    for (int i = 0; i < num_parts; ++i) {
      PartOfCheck part = num_parts == 1 ? PartOfCheck() : PartOfCheck(i, num_parts);
      verify_part(
          *reader, adding_to(found), [](std::uint64_t) {}, 1, part);
    }
    return found;
  }
  std::vector<std::string> findings_of_files() const {
    std::vector<std::string> found;
    open_checkpoint(fs_, path())->check_files(adding_to(found));
    return found;
  }

  FileSystem& fs_ = FileSystem::posix();
  test::TemporaryDirectory tmp_;

 private:
  FindingSink adding_to(std::vector<std::string>& found) const {
    return [this, &found](const Finding& each) {
      const bool is_error = each.severity == Finding::Severity::error;
      found.push_back(each.where.path.substr(path().size() + 1) + ": " +
                      (is_error ? "error " : "note ") + each.rule + ": " + each.expected +
                      ", found " + each.found);
    };
  }
};

constexpr const char* kNoConfig =
    "metadata.json: error structure: the file that Megatron writes last, found none (an "
    "interrupted save, or an incomplete copy?)";
constexpr const char* kNoCommon =
    "common.pt: error structure: this file of Megatron's torch_dist, or the object "
    "'common_state' in its place, found neither (an incomplete copy?)";

TEST_F(TorchDistFilesTest, AWholeFolderIsSound) {
  EXPECT_THAT(findings(), IsEmpty());
  EXPECT_TRUE(megatron::is_torch_dist(fs_, path()));
}

TEST_F(TorchDistFilesTest, AMissingFileIsNamed) {
  stdfs::remove(file("common.pt"));
  EXPECT_THAT(findings(), ElementsAre(kNoCommon));
  EXPECT_THAT(findings_of_files(), ElementsAre(kNoCommon));
  SetUp();
  stdfs::remove(file("metadata.json"));
  EXPECT_THAT(findings(), ElementsAre(kNoConfig));
  EXPECT_THAT(findings_of_files(), ElementsAre(kNoConfig));
}

TEST_F(TorchDistFilesTest, TheCommonObjectIsOpenedAlone) {
  MemoryCheckpoint source("model");
  source.add({"weight", DType::float32, {2}}, bytes_of<float>({1, 2}));
  source.add_value("common_state/shard_0_1", Value(std::int64_t{7}));
  source.add_value("weight._extra_state/shard_0_1", Value(std::int64_t{8}));
  write(source, Format::dcp);
  const auto reader = megatron::open_common_object(fs_, path());
  ASSERT_NE(reader, nullptr);
  EXPECT_THAT(reader->contents().tensors, IsEmpty());
  ASSERT_EQ(reader->contents().values.size(), 1U);
  EXPECT_EQ(reader->contents().values.front().name, "common_state/shard_0_1");
  EXPECT_EQ(reader->read_value(0), Value(std::int64_t{7}));
  SetUp();
  EXPECT_EQ(megatron::open_common_object(fs_, path()), nullptr);
}

constexpr const char* kOtherPickle =
    "common.pt: error structure: a torch.save file, as Megatron writes it, found CRC-32 of zip "
    "member 'archive/data.pkl': expected ";

TEST_F(TorchDistFilesTest, FlippedBytesOfCommonAreFound) {
  constexpr std::size_t kStep = 13;
  const std::string whole = content("common.pt");
  std::size_t num_found = 0;
  for (std::size_t at = 0; at < whole.size(); at += kStep) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    replace("common.pt", damaged);
    const auto found = findings();
    for (const std::string& each : found) EXPECT_THAT(each, HasSubstr("common.pt: error"));
    if (!found.empty()) ++num_found;
  }
  EXPECT_GT(num_found, whole.size() / kStep / 3);  // readers ignore some bytes of a zip archive
  std::string damaged = whole;
  damaged[damaged.find("checkpoint_version")] = 'C';
  replace("common.pt", damaged);
  EXPECT_THAT(findings(), ElementsAre(HasSubstr(kOtherPickle)));
}

TEST_F(TorchDistFilesTest, ACommonThatIsCutShortIsFound) {
  const std::string whole = content("common.pt");
  for (const std::size_t nbytes :
       {std::size_t{0}, std::size_t{1}, whole.size() / 2, whole.size() - 1}) {
    SCOPED_TRACE(nbytes);
    replace("common.pt", whole.substr(0, nbytes));
    EXPECT_THAT(findings(), ElementsAre(HasSubstr("common.pt: error structure: ")));
  }
}

TEST_F(TorchDistFilesTest, AConfigOfAnotherKindIsFound) {
  for (const char* text :
       {"", "{", "[]", "{}", "{\"sharded_backend\": 1}", "{\"sharded_backend\": \"zarr\"}"}) {
    SCOPED_TRACE(text);
    replace("metadata.json", text);
    EXPECT_THAT(findings(), ElementsAre(HasSubstr("metadata.json: error structure: an object with "
                                                  "\"sharded_backend\": \"torch_dist\", found ")));
    EXPECT_FALSE(megatron::is_torch_dist(fs_, path()));
  }
}

TEST_F(TorchDistFilesTest, EachFindingIsOfOnePart) {
  std::string damaged = content("common.pt");
  damaged[damaged.find("checkpoint_version")] = 'C';
  replace("common.pt", damaged);
  stdfs::remove(file("metadata.json"));
  for (const int num_parts : {1, 2, 3, 7}) {
    SCOPED_TRACE(num_parts);
    EXPECT_THAT(findings(num_parts),
                testing::UnorderedElementsAre(kNoConfig, HasSubstr(kOtherPickle)));
  }
}

// Newer versions of Megatron keep the common state in such an object, not in common.pt.
TEST_F(TorchDistFilesTest, AnObjectStandsForCommon) {
  const std::string config = content("metadata.json");
  for (const char* name : {"common_state/shard_0_1", "common_state"}) {
    SCOPED_TRACE(name);
    MemoryCheckpoint source("model");
    source.add_value(name, Value(Value::List{Value::Dict{{"iteration", 7}}}));
    write(source, Format("dcp"));
    // Any program may have a key `common_state`; only Megatron adds a shard's place.
    const bool is_of_megatron = std::string_view(name) != "common_state";
    EXPECT_EQ(findings(),
              is_of_megatron ? std::vector<std::string>{kNoConfig} : std::vector<std::string>());
    replace("metadata.json", config);
    EXPECT_THAT(findings(), IsEmpty());
  }
}

TEST_F(TorchDistFilesTest, OtherCheckpointsOfDcpNeedNeither) {
  MemoryCheckpoint source("model");
  source.add_value("step", Value(std::int64_t{7}));
  write(source, Format("dcp"));
  EXPECT_THAT(findings(), IsEmpty());
  replace("common.pt", "no file of torch.save");  // of another program
  EXPECT_THAT(findings(), IsEmpty());
  EXPECT_THAT(findings_of_files(), IsEmpty());
  stdfs::remove(file("common.pt"));
  replace("metadata.json", "[]");  // also of another program
  EXPECT_THAT(findings(), IsEmpty());
  source.add_value("decoder.layers._extra_state/shard_0_1", Value(Value::List{Value()}));
  write(source, Format("dcp"));
  EXPECT_THAT(findings(), ElementsAre("metadata.json: note structure: metadata.json and common.pt, "
                                      "without which Megatron refuses the folder, found neither of "
                                      "them"));
}

}  // namespace
}  // namespace tessera::formats
