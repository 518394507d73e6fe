#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <stdexcept>

#include "runtime/state/small_trainer.h"
#include "support/random.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"

// Flips single bits in the files of a checkpoint that a trainer saved.

namespace tessera {
namespace {

using test::SmallTrainer;

constexpr int kWorldSize = 2;
// Shards of 80 KB are compressed, in two chunks each; smaller tensors are not.
constexpr int kWidth = 200;
const formats::NativeWriteOptions kNative{
    .compression = formats::NativeWriteOptions::Compression::zstd, .chunk_nbytes = 64 << 10};
constexpr std::uintmax_t kSignatureNbytes = 8;
constexpr const char* kFiles[] = {"index.h5", "rank-00000.h5", "rank-00001.h5"};

struct Flip {
  std::string path;
  std::uintmax_t position = 0;
  int bit = 0;

  std::string text() const {
    return path + ": byte " + std::to_string(position) + ", bit " + std::to_string(bit);
  }
  void apply() const {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    char byte = 0;
    file.seekg(static_cast<std::streamoff>(position)).get(byte);
    byte = static_cast<char>(byte ^ (1 << bit));
    file.seekp(static_cast<std::streamoff>(position)).put(byte);
    ASSERT_TRUE(file.flush().good()) << text();
  }
};

/// Draws a byte of the checkpoint, all with equal probability, and a bit of it.
Flip draw(test::Random& random, const std::string& checkpoint) {
  std::uintmax_t total = 0;
  for (const char* name : kFiles) total += std::filesystem::file_size(checkpoint + "/" + name);
  auto position = static_cast<std::uintmax_t>(random.between(0, static_cast<std::int64_t>(total)));
  for (const char* name : kFiles) {
    const std::string path = checkpoint + "/" + name;
    const std::uintmax_t nbytes = std::filesystem::file_size(path);
    if (position < nbytes) return {path, position, static_cast<int>(random.between(0, 8))};
    position -= nbytes;
  }
  throw std::logic_error("a position beyond the last file");
}

/// Returns copies of all tensors that this rank holds.
std::vector<at::Tensor> held_by(SmallTrainer& trainer) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> held;
  for (const at::Tensor& tensor : trainer.model->parameters()) held.push_back(tensor.clone());
  for (const at::Tensor& tensor : trainer.moments()) held.push_back(tensor.clone());
  held.push_back(torch::tensor(trainer.number));
  return held;
}

bool are_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::ranges::equal(a, b,
                            [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

enum class Outcome { refused, loaded };

/// Loads a checkpoint with one bit flipped. Expects either an error that names the file, of the
/// same kind on all ranks, or the saved state. Collective.
Outcome load_with(const Flip& flip, const dist::Mesh& mesh, const std::string& path,
                  SmallTrainer& trainer, TrainState& state, const std::vector<at::Tensor>& saved) {
  trainer.fill(-1);
  try {
    load(state, path);
  } catch (const Error& error) {
    // A file whose signature is damaged is not recognized as ours.
    EXPECT_EQ(error.kind(),
              flip.position < kSignatureNbytes ? ErrorKind::unsupported : ErrorKind::corruption)
        << flip.text() << ": " << error.what();
    EXPECT_THAT(error.what(), testing::HasSubstr(flip.path)) << flip.text();
    return Outcome::refused;
  } catch (const std::exception& error) {
    ADD_FAILURE() << flip.text() << ": no Error: " << error.what();
    return Outcome::refused;
  }
  EXPECT_TRUE(are_equal(held_by(trainer), saved)) << flip.text() << ", rank " << mesh.rank();
  return Outcome::loaded;
}

/// Expects that checking checksums finds a flip in bytes of HDF5 that loading ignores.
void expect_found_by_checksums(const Flip& flip, const std::string& directory) {
  const auto latest =
      formats::latest_valid(FileSystem::posix(), directory, formats::Validation::checksums);
  EXPECT_EQ(latest.path, "") << flip.text();
  ASSERT_EQ(latest.skipped.size(), 1U) << flip.text();
  EXPECT_THAT(latest.skipped[0].why, testing::HasSubstr(flip.path));
}

std::set<std::string> encodings_in(const std::string& path) {
  std::set<std::string> encodings;
  const auto reader = formats::open_checkpoint(FileSystem::posix(), path);
  for (std::size_t t = 0; t < reader->contents().tensors.size(); ++t) {
    for (std::size_t p = 0; p < reader->contents().tensors[t].pieces.size(); ++p) {
      encodings.insert(reader->piece_storage(t, p).encoding);
    }
  }
  return encodings;
}

/// Flips bits of one checkpoint, one at a time. `choose` gets the checkpoint's path and the flip's
/// number, and returns the flip. Returns how many flips loading found.
int flip_bits(int num_flips, const std::function<Flip(const std::string&, int)>& choose) {
  const test::TemporaryDirectory directory;
  const std::string path = directory / "step-1";
  Flip flip;
  int num_refused = 0;
  test::on_ranks(kWorldSize, [&](const dist::Mesh& mesh) {
    SmallTrainer trainer(mesh, kWidth);
    trainer.number = 1;
    TrainState state = trainer.state();
    save(state, path, {.native = kNative});
    const std::vector<at::Tensor> saved = held_by(trainer);
    if (mesh.rank() == 0) {
      EXPECT_EQ(encodings_in(path), (std::set<std::string>{"plain", "zstd"}));
    }
    for (int i = 0; i < num_flips; ++i) {
      if (mesh.rank() == 0) {
        flip = choose(path, i);
        flip.apply();
      }
      mesh.world()->max(0, "flipped");
      const Outcome outcome = load_with(flip, mesh, path, trainer, state, saved);
      mesh.world()->max(0, "loaded");
      if (mesh.rank() != 0) continue;
      if (outcome == Outcome::loaded) expect_found_by_checksums(flip, directory.path());
      num_refused += outcome == Outcome::refused ? 1 : 0;
      flip.apply();  // flips the bit back
    }
  });
  return num_refused;
}

constexpr int kNumFlips = 200;

void flip_random_bits(test::Random& random) {
  const int num_found = flip_bits(
      kNumFlips, [&](const std::string& path, int /*number*/) { return draw(random, path); });
  EXPECT_GT(num_found, kNumFlips / 2);
}

// Shows E4.
TEST(BitFlipsTest, OneBitIsFoundOrDecidesNothing) {
  test::Random random;
  flip_random_bits(random);
}

// Shows E4.
TEST(BitFlipsTest, EachBitThatAFileBeginsWithIsFound) {
  constexpr int kNumBits = 16 * 8;
  constexpr int kNumInAll = kNumBits * static_cast<int>(std::size(kFiles));
  const int num_found = flip_bits(kNumInAll, [](const std::string& path, int number) {
    const int bit = number % kNumBits;
    return Flip{path + "/" + kFiles[number / kNumBits], static_cast<std::uintmax_t>(bit / 8),
                bit % 8};
  });
  EXPECT_EQ(num_found, kNumInAll);
}

// Shows E4.
TEST(SlowBitFlipsTest, OneBitIsFoundOrDecidesNothing) {
  test::Random random;
  for (int round = 0; round < 10'000 / kNumFlips; ++round) flip_random_bits(random);
}

}  // namespace
}  // namespace tessera
