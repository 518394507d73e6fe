#include <gmock/gmock.h>

#include <map>
#include <optional>
#include <set>
#include <stdexcept>

#include "formats/native/rank_files.h"
#include "formats/native/stored_blocks.h"
#include "formats/native_checkpoint.h"
#include "reshard/resharding.h"
#include "support/memory_files.h"
#include "support/random.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"

// Flips single bits in the files of a native checkpoint: in data, index, and HDF5's own structures.
// `verify` must find each flip. Reading and resharding must throw, or give the bytes as written.

namespace tessera::test {
namespace {

using formats::CheckpointReader;
using formats::Finding;
using testing::HasSubstr;

const std::string kPath = "checkpoint";

/// Has each kind of stored data: one block, several uncompressed blocks, compressed chunks.
MemoryCheckpoint source() {
  Random random;
  MemoryCheckpoint checkpoint("source", 2);
  checkpoint.add({"layers.0.weight", DType::bfloat16, {100, 40}},
                 weight_like_bytes(8000, 2, random),
                 {{Box{{0, 0}, {50, 40}}, 0}, {Box{{50, 0}, {50, 40}}, 1}});
  checkpoint.add({"layers.1.weight", DType::float32, {40'000}},
                 weight_like_bytes(160'000, 4, random), {{FlatRange{0, 40'000}, 0}});
  checkpoint.add({"noise", DType::uint8, {150'000}}, random_bytes(150'000, random),
                 {{Box{{0}, {150'000}}, 1}});
  checkpoint.add({"step", DType::float32, {}}, bytes_of<float>({3}), {{Box{}, 1}});
  checkpoint.add_value("epoch", 7);
  checkpoint.add_alias("tied", "layers.0.weight");
  return checkpoint;
}

struct Flip {
  std::string file;
  std::size_t position = 0;
  int bit = 0;

  std::string text() const {
    return file + ": byte " + std::to_string(position) + ", bit " + std::to_string(bit);
  }
  void apply(MemoryFiles& fs) const {
    char& byte = fs[file][position];
    byte = static_cast<char>(byte ^ (1 << bit));
  }
};

/// A native checkpoint in memory, and its tensors as they were before any bit was flipped.
class NativeBitFlips {
 public:
  NativeBitFlips() : fs_(kPath, written()) {
    const auto reader = open();
    for (std::size_t t = 0; t < reader->contents().tensors.size(); ++t) {
      whole_.push_back(whole_tensor(*reader, t));
    }
    resharded_ = resharded(*reader);
    for (const auto& [name, bytes] : fs_.files()) num_bytes_ += bytes.size();
    for (int rank = 0; rank < reader->contents().world_size; ++rank) note_data_of(rank);
  }

  /// Draws a random bit; all bits are equally likely.
  Flip draw(Random& random) const {
    auto position =
        static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(num_bytes_)));
    for (const auto& [name, bytes] : fs_.files()) {
      if (position < bytes.size()) return {name, position, static_cast<int>(random.between(0, 8))};
      position -= bytes.size();
    }
    throw std::logic_error("a position beyond the last file");
  }

  /// Flips the bit, expects that verify, reads and resharding find it, and flips it back.
  void expect_found(const Flip& flip) {
    SCOPED_TRACE(flip.text());
    const std::string fqn = tensor_at(flip);
    num_in_data_ += fqn.empty() ? 0 : 1;
    flip.apply(fs_);
    try {
      const auto reader = open();
      expect_verify_finds(*reader, flip, fqn);
      expect_reads_find(*reader, flip, fqn);
      expect_resharding_finds(*reader, flip, fqn);
    } catch (const Error& error) {
      EXPECT_EQ(flip.file, "index.h5") << error.what();  // opening reads only the index
      expect_names(error, flip, "");
    }
    flip.apply(fs_);
  }

  int num_in_data() const { return num_in_data_; }

 private:
  static std::map<std::string, std::string> written() {
    const TemporaryDirectory directory;
    formats::NativeWriteOptions options;
    options.compression = formats::NativeWriteOptions::Compression::zstd;
    options.chunk_nbytes = 65536;
    write_native(source(), directory / "c", options);
    return files_of(directory / "c");
  }

  std::unique_ptr<CheckpointReader> open() const { return formats::open_native(fs_, kPath); }

  static std::vector<Bytes> resharded(const CheckpointReader& reader) {
    const MemoryCheckpoint moved =
        reshard_in_memory(reader, {.world_size = 3, .strategy = "dim0"}, 1, 1 << 20);
    std::vector<Bytes> tensors;
    for (std::size_t t = 0; t < moved.contents().tensors.size(); ++t) {
      tensors.push_back(whole_tensor(moved, t));
    }
    return tensors;
  }

  void note_data_of(int rank) {
    using namespace formats::native;
    const RankFileIndex file = read_rank_file_index(fs_, kPath, rank, 2);
    const std::string name = rank_file_name(rank);
    const auto bytes = fs_.open(join_path(kPath, name));
    for (std::size_t t = 0; t < file.index.contents->tensors.size(); ++t) {
      const std::string& fqn = file.index.contents->tensors[t].meta.fqn;
      for (std::size_t p = 0; p < file.index.storage.num_pieces(t); ++p) {
        const BlockGrid grid = file.index.grid({t, p});
        for (const StoredBlock& block : read_block_entries(*bytes, fqn, file.index.stored({t, p}),
                                                           grid, 0, grid.num_blocks())) {
          data_.push_back({name, block.range, fqn});
        }
      }
    }
  }

  /// Returns the tensor whose data has the flipped bit; empty if the bit is not in tensor data.
  std::string tensor_at(const Flip& flip) const {
    for (const Data& data : data_) {
      const bool is_in = flip.position >= data.range.begin && flip.position < data.range.end;
      if (data.file == flip.file && is_in) return data.fqn;
    }
    return "";
  }

  static void expect_names(const Error& error, const Flip& flip, const std::string& fqn) {
    const bool has_signature = flip.position >= 8;  // else it is no native file
    EXPECT_EQ(error.kind(), has_signature ? ErrorKind::corruption : ErrorKind::unsupported)
        << error.what();
    EXPECT_THAT(error.what(), HasSubstr(join_path(kPath, flip.file)));
    EXPECT_THAT(error.what(), HasSubstr(fqn.empty() ? fqn : ": " + fqn + ": "));
  }

  static void expect_verify_finds(const CheckpointReader& reader, const Flip& flip,
                                  const std::string& fqn) {
    std::vector<Finding> findings;
    reader.verify([&](const Finding& finding) { findings.push_back(finding); }, {});
    const auto is_of_flip = [&](const Finding& finding) {
      return finding.severity == Finding::Severity::error &&
             finding.where.path == join_path(kPath, flip.file) &&
             (fqn.empty() || finding.where.fqn == fqn);
    };
    EXPECT_TRUE(std::ranges::any_of(findings, is_of_flip)) << findings.size() << " findings";
  }

  void expect_reads_find(const CheckpointReader& reader, const Flip& flip,
                         const std::string& fqn) const {
    for (std::size_t t = 0; t < reader.contents().tensors.size(); ++t) {
      const std::string& read = reader.contents().tensors[t].meta.fqn;
      try {
        EXPECT_EQ(whole_tensor(reader, t), whole_[t]) << read;
        EXPECT_NE(read, fqn);
      } catch (const Error& error) {
        EXPECT_TRUE(fqn.empty() || read == fqn) << error.what();
        expect_names(error, flip, fqn);
      }
    }
    EXPECT_EQ(reader.read_value(0), Value(7));
  }

  void expect_resharding_finds(const CheckpointReader& reader, const Flip& flip,
                               const std::string& fqn) const {
    try {
      EXPECT_EQ(resharded(reader), resharded_);
      EXPECT_EQ(fqn, "");
    } catch (const Error& error) {
      expect_names(error, flip, fqn);
    }
  }

  struct Data {
    std::string file;
    ByteRange range;
    std::string fqn;
  };
  MemoryFiles fs_;
  std::vector<Data> data_;
  std::vector<Bytes> whole_;
  std::vector<Bytes> resharded_;
  std::size_t num_bytes_ = 0;
  int num_in_data_ = 0;
};

void flip_random_bits(int num_flips) {
  NativeBitFlips checkpoint;
  Random random(1);
  for (int i = 0; i < num_flips && !testing::Test::HasFailure(); ++i) {
    checkpoint.expect_found(checkpoint.draw(random));
  }
  EXPECT_GT(checkpoint.num_in_data(), num_flips / 2);
}

// Shows E4.
TEST(NativeBitFlipsTest, EveryBitIsFoundByVerifyAndByReadingOrHarmless) {
  flip_random_bits(300);
}

// Shows E4.
TEST(SlowNativeBitFlipsTest, EveryOfTenThousandIsFound) {
  flip_random_bits(10'000);
}

/// HDF5's structures are small, so few of the random flips are in them.
/// Shows E4.
TEST(NativeBitFlipsTest, BitsOfTheHeadersAreFound) {
  NativeBitFlips checkpoint;
  for (const char* file : {"index.h5", "rank-00000.h5"}) {
    for (std::size_t position = 0; position < 80; ++position) {
      checkpoint.expect_found({file, position, static_cast<int>(position % 8)});
    }
  }
}

}  // namespace
}  // namespace tessera::test
