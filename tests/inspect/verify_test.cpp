#include "tessera/inspect/verify.h"

#include <gmock/gmock.h>

#include <cmath>
#include <memory>
#include <stop_token>
#include <utility>

#include "base/forwarding_file_system.h"
#include "inspect/tensor_digests.h"
#include "support/error_matchers.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "tessera/formats/detect.h"

namespace tessera::inspect {
namespace {

using test::MemoryCheckpoint;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> rules(const VerifyReport& report) {
  std::vector<std::string> rules;
  for (const auto& finding : report.findings)
    rules.push_back(finding.where.fqn + ":" + finding.rule);
  return rules;
}

TEST(VerifyTest, ASoundCheckpointHasNoFindings) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"t", DType::float32, {2}}, test::bytes_of<float>({1, std::nanf("")}),
                 {{FlatRange{0, 1}, 0}, {FlatRange{1, 2}, 1}, {FlatRange{1, 2}, 0}});
  checkpoint.add_value("step", Value(3));
  checkpoint.add_alias("u", "t");
  VerifyOptions options;
  std::uint64_t nbytes = 0;
  options.scan.progress = [&](std::uint64_t n) { nbytes += n; };
  const VerifyReport report = verify(checkpoint, options);
  EXPECT_THAT(report.findings, IsEmpty());
  EXPECT_FALSE(report.has_errors());
  EXPECT_EQ(report.num_tensors, 1);
  EXPECT_EQ(report.num_pieces, 3);
  EXPECT_EQ(report.num_values, 1);
  EXPECT_EQ(report.nbytes, 12U);
  EXPECT_EQ(nbytes, verify_nbytes(checkpoint, options));
}

TEST(VerifyTest, ReportsAllFindingsInOneGo) {
  MemoryCheckpoint checkpoint;
  const auto bytes = test::bytes_of<float>({1, 2, 3, 4});
  checkpoint.add({"hole", DType::float32, {4}}, bytes, {{FlatRange{0, 3}, 0}});
  checkpoint.add({"overlap", DType::float32, {4}}, bytes,
                 {{FlatRange{0, 3}, 0}, {FlatRange{2, 4}, 1}});
  checkpoint.add({"damaged", DType::float32, {4}}, bytes);
  checkpoint.fail_reads_of("damaged", 0);
  checkpoint.add_alias("tied", "nowhere");
  const VerifyReport report = verify(checkpoint, {});
  EXPECT_THAT(rules(report),
              ElementsAre("damaged:checksum", "hole:coverage", "overlap:coverage", "tied:alias"));
  EXPECT_TRUE(report.has_errors());
}

TEST(VerifyTest, UnitsThatFitNoTensorAreFindings) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"t", DType::float32, {2}}, test::bytes_of<float>({1, 2}));
  checkpoint.add_alias("tied", "t");
  checkpoint.contents_for_change().units = {
      make_flat_unit("unit", DType::float32, {{"t", {2}}, {"tied", {2}}, {"gone", {3}}})};
  EXPECT_THAT(rules(verify(checkpoint, {})), ElementsAre("gone:units"));
  checkpoint.contents_for_change().units[0].parameters = {{"t", {3}, 0}};
  EXPECT_THAT(rules(verify(checkpoint, {})), ElementsAre("t:units"));
}

TEST(VerifyTest, NumbersThatAreNotFiniteAreFindingsWhenAsked) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"good", DType::float32, {1}}, test::bytes_of<float>({1}));
  checkpoint.add({"bad", DType::float32, {3}},
                 test::bytes_of<float>({std::nanf(""), HUGE_VALF, -HUGE_VALF}));
  checkpoint.add({"int", DType::int32, {1}}, test::bytes_of<std::int32_t>({-1}));
  checkpoint.add({"damaged", DType::float32, {1}}, test::bytes_of<float>({1}));
  checkpoint.fail_reads_of("damaged", 0);
  VerifyOptions options;
  options.numbers = VerifyOptions::Numbers::must_be_finite;
  const VerifyReport report = verify(checkpoint, options);
  EXPECT_THAT(rules(report), ElementsAre("bad:finite", "damaged:checksum"));
  EXPECT_EQ(report.findings[0].found, "1 NaN and 2 Inf");
}

/// A reader whose verify() and check_files() report nothing, even if reads fail.
class CheckpointNotChecked final : public formats::CheckpointReader {
 public:
  explicit CheckpointNotChecked(const MemoryCheckpoint& checkpoint) : checkpoint_(checkpoint) {}

  formats::Format format() const override { return checkpoint_.format(); }
  const std::string& path() const override { return checkpoint_.path(); }
  const formats::CheckpointContents& contents() const override { return checkpoint_.contents(); }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    checkpoint_.read_piece(tensor_index, piece_index, range, out);
  }
  Value read_value(std::size_t value_index) const override {
    return checkpoint_.read_value(value_index);
  }
  formats::PieceStorage piece_storage(std::size_t, std::size_t) const override { return {}; }
  void check_files(const formats::FindingSink&) const override {}
  std::vector<std::string> data_files() const override { return {}; }
  void verify(const formats::FindingSink&, const formats::ProgressSink&, int) const override {}

 private:
  const MemoryCheckpoint& checkpoint_;
};

TEST(VerifyTest, NumbersThatCannotBeReadAreFindings) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"damaged", DType::float32, {1}}, test::bytes_of<float>({1}));
  checkpoint.fail_reads_of("damaged", 0);
  VerifyOptions options;
  options.numbers = VerifyOptions::Numbers::must_be_finite;
  EXPECT_TRUE(verify(CheckpointNotChecked(checkpoint), options).has_errors());
}

/// The local file system. After a stop request, no file can be opened or read, as on a server.
class StoppedServer final : public ForwardingFileSystem {
 public:
  explicit StoppedServer(std::stop_token stop)
      : ForwardingFileSystem(FileSystem::posix()), stop_(std::move(stop)) {}

  std::unique_ptr<ReadableFile> open(const std::string& path) const override {
    refuse_if_stopped();
    return std::make_unique<File>(*this, ForwardingFileSystem::open(path));
  }

 private:
  class File final : public ReadableFile {
   public:
    File(const StoppedServer& server, std::unique_ptr<ReadableFile> file)
        : server_(server), file_(std::move(file)) {}
    const std::string& path() const override { return file_->path(); }
    std::uint64_t nbytes() const override { return file_->nbytes(); }
    void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
      server_.refuse_if_stopped();
      file_->read_at(offset, out);
    }

   private:
    const StoppedServer& server_;
    std::unique_ptr<ReadableFile> file_;
  };

  void refuse_if_stopped() const {
    if (stop_.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
  }

  std::stop_token stop_;
};

TEST(VerifyTest, AFileThatCannotBeReadAfterAStopIsNoFinding) {
  for (const char* name :
       {"native/v1/plain", "native/v4/patched", "safetensors/valid/single.safetensors",
        "safetensors/valid/sharded", "dcp/valid/fsdp2_adamw"}) {
    SCOPED_TRACE(name);
    std::stop_source source;
    VerifyOptions options;
    options.scan.stop = source.get_token();
    const StoppedServer server(source.get_token());
    const auto reader = formats::open_checkpoint(server, test::fixture(name));
    source.request_stop();
    const formats::FindingSink no_error = [](const formats::Finding& finding) {
      EXPECT_NE(finding.severity, formats::Finding::Severity::error) << finding.found;
    };
    const formats::ProgressSink progress = [](std::uint64_t) {};
    EXPECT_THAT([&] { reader->verify(no_error, progress, 1); },
                test::ThrowsError(ErrorKind::interrupted, ""));
    EXPECT_THAT([&] { verify(*reader, options); }, test::ThrowsError(ErrorKind::interrupted, ""));
  }
}

TEST(VerifyTest, AStopIsNoFindingOfAnyFormat) {
  VerifyOptions options;
  std::stop_source source;
  source.request_stop();
  options.scan.stop = source.get_token();
  for (const char* name : {"safetensors/valid/single.safetensors", "torch_zip/valid/state_dict.pt",
                           "dcp/valid/fsdp2_adamw"}) {
    SCOPED_TRACE(name);
    const auto reader = formats::open_checkpoint(FileSystem::posix(), test::fixture(name));
    try {
      verify(*reader, options);
      ADD_FAILURE() << "went on";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::interrupted);
    }
  }
}

TEST(TensorDigestTest, IsTheSha256OfTheWholeTensorWhateverThePieces) {
  // "abc" and the empty text, as in FIPS 180-4's examples.
  const test::Bytes abc = {std::byte{'a'}, std::byte{'b'}, std::byte{'c'}};
  MemoryCheckpoint checkpoint;
  checkpoint.add({"abc", DType::uint8, {3}}, abc, {{FlatRange{2, 3}, 0}, {FlatRange{0, 2}, 1}});
  checkpoint.add({"none", DType::float32, {0}}, {});
  const std::vector<std::size_t> both = {0, 1};
  ScanOptions options;
  options.num_threads = 2;
  EXPECT_THAT(compute_digests(checkpoint, both, options),
              ElementsAre("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
                          "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
}

}  // namespace
}  // namespace tessera::inspect
