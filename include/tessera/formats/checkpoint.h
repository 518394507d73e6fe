#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/base/tensor_meta.h"
#include "tessera/base/value.h"
#include "tessera/formats/format.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/layout/region.h"

namespace tessera::formats {

/// How a tensor's elements relate to a parameter, which is what decides how it reshards.
/// Stored on disk; never renumber.
enum class StateKind : std::uint8_t {
  plain = 0,               // a parameter or buffer: belongs to itself
  pointwise = 1,           // one element per element of its parameter (exp_avg)
  row_wise = 2,            // one element per row of its parameter (row-wise Adagrad)
  scalar_parameter = 3,    // one value per parameter (step)
  scalar_table = 4,        // one value per embedding table (iter)
  opaque = 5,              // moved as a whole, never cut
  row_wise_per_shard = 6,  // one block of rows per column shard (torchrec); merging is lossy
};

/// Returns the enumerator's name, such as `row_wise_per_shard`.
std::string_view state_kind_name(StateKind kind);

/// A dict's key that is no string, such as the numbers in the `state` of an optimizer.
struct DictKey {
  std::string json;  // what value_to_json makes of the key
  friend auto operator<=>(const DictKey&, const DictKey&) = default;
};

/// A step into a nested state dict: a dict's key that is a string, a position in a list, or another
/// key of a dict.
using KeyStep = std::variant<std::string, std::int64_t, DictKey>;

/// Where in the nested state dict a flattened key came from, outermost step first.
using KeyPath = std::vector<KeyStep>;

/// Returns the step that the key of a dict makes; nothing for what Python cannot hash.
std::optional<KeyStep> key_step(const Value& key);

/// Returns the key that `key_step` made the step of. Requires: one of its results.
Value key_of(const DictKey& step);

/// Returns the flattened key that a path has: its steps joined by dots, each as Python's str() has
/// it.
std::string spell(const KeyPath& path);

/// Returns the path as a list: strings and positions as they are, another key in a list of its own.
Value key_path_to_value(const KeyPath& path);
/// Undoes `key_path_to_value`; nothing for what it does not make.
std::optional<KeyPath> key_path_from_value(const Value& value);

/// A region of a tensor together with the rank whose file holds it.
struct Piece {
  Region region;
  int rank = 0;
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// A logical tensor with the pieces that cover it. Equal regions are replicas.
struct TensorEntry {
  TensorMeta meta;
  StateKind kind = StateKind::plain;
  std::string parameter{};  // fqn of the parameter that optimizer state belongs to, else empty
  KeyPath key_path{};       // empty: the fqn is a top-level key
  std::vector<Piece> pieces{};
};

/// Something that is not a tensor, under its flattened key.
struct ValueEntry {
  std::string name;
  KeyPath key_path{};
};

/// A second name of a tensor (tied weights). Never chained: `target` is a tensor's fqn.
struct Alias {
  std::string fqn;
  std::string target;
  KeyPath key_path{};
};

/// All that a checkpoint holds, without a byte of tensor data: what a reader found, or what a
/// writer is to write. Lists are sorted by name (byte order); no name appears twice in all three.
struct CheckpointContents {
  int world_size = 1;
  std::vector<TensorEntry> tensors{};
  std::vector<ValueEntry> values{};
  std::vector<Alias> aliases{};
  std::vector<FlatUnit> units{};                     // flat parameters, where known
  std::map<std::string, std::string> annotations{};  // free text that the format carried
  std::vector<std::string> missing_files{};          // that it says it has, and has not

  const TensorEntry* find_tensor(std::string_view fqn) const;  // an alias is not followed
};

/// Where a piece's bytes lie, for people to look at.
struct PieceStorage {
  std::string file;                     // relative to the checkpoint; of a merge, behind its path
  std::optional<ByteRange> byte_range;  // nothing where the piece is not one range
  std::string encoding;                 // `plain`, `zstd`
  std::uint64_t stored_nbytes = 0;
};

/// What lies in files of a checkpoint that are not there, each with the name of its file.
struct Losses {
  using Pieces = std::map<std::size_t, std::string>;  // by piece of a tensor

  std::map<std::size_t, Pieces> pieces{};       // by tensor; pieces with elements alone
  std::map<std::size_t, std::string> values{};  // by value
};

/// One result of a check. Rules are stable words, such as `checksum`, `coverage`, `structure`; all
/// of them are in docs/cli/ckpt-inspect.md.
struct Finding {
  /// A note does not make a checkpoint unsound.
  enum class Severity { note, error } severity = Severity::error;
  std::string rule;
  ErrorWhere where;
  std::string expected;
  std::string found;
  Remedy remedy{};  // what the caller can do about it
};

/// Returns a finding as an error: `<where>: <rule>: expected <x>, found <y> (<remedy>)`.
Error finding_to_error(const Finding& finding);
/// Returns its line, with the remedy in the words of C++.
std::string finding_to_string(const Finding& finding);

/// Takes one finding after the other.
using FindingSink = std::function<void(const Finding&)>;

/// Takes the number of bytes that have just been dealt with; called from any thread.
using ProgressSink = std::function<void(std::uint64_t nbytes)>;

/// Tensors whose bytes can be read piece by piece: of an open checkpoint, or of a trainer in
/// memory. What a move needs of its source. Thread-safe.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  /// Returns which tensors there are. Lives as long as this object.
  virtual const CheckpointContents& contents() const = 0;

  /// Fills `out` with elements `[range.begin, range.end)` of one piece, in the piece region's own
  /// row-major order, little-endian. Checks every stored checksum that covers what it reads.
  /// Requires: `out.size() == range.numel() * itemsize`.
  /// Throws: Error(corruption) with file, tensor and byte range; Error(io).
  virtual void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                          std::span<std::byte> out) const = 0;
};

/// An open checkpoint. Everything is read-only and thread-safe after opening; files are opened when
/// first needed. Everything from disk has been checked before it is in `contents()`: dtypes known,
/// shapes bounded, regions inside their tensor, names unique. Coverage is the caller's to check
/// (`check_coverage`), as a checkpoint with holes can still be looked into.
class CheckpointReader : public TensorSource {
 public:
  /// Returns the format that was found; of a merge, that of the first source.
  virtual Format format() const = 0;
  /// Returns the path that was opened.
  virtual const std::string& path() const = 0;

  /// Returns the value stored under `contents().values[value_index]`.
  virtual Value read_value(std::size_t value_index) const = 0;

  /// Returns where the bytes of a piece lie. `piece_index`: in the tensor's pieces.
  virtual PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const = 0;

  /// Checks that every file which the checkpoint names is there, has its size, and belongs to it as
  /// far as the format can tell. Reads no tensor data. Reports, and goes on where it can.
  /// Throws: Error(io).
  virtual void check_files(const FindingSink& sink) const = 0;

  /// Returns the paths of the files that tensors' bytes are read from, each once. None for what
  /// lies in memory.
  virtual std::vector<std::string> data_files() const = 0;

  /// Looks for the files that pieces and values lie in, and returns what cannot be read as there is
  /// none. Opens no file. Nothing for formats that open only where all files are there.
  /// Throws: Error(io).
  virtual Losses find_losses() const { return {}; }

  /// Checks all that the format can check beyond what opening did: every stored byte against its
  /// checksum, structure, files present. Reports, and goes on where it can. `num_threads` are the
  /// most that read; 0: as many as there are cores. Findings do not depend on it.
  virtual void verify(const FindingSink& sink, const ProgressSink& progress,
                      int num_threads) const = 0;
  void verify(const FindingSink& sink, const ProgressSink& progress) const {
    verify(sink, progress, 0);
  }
};

/// Writes one checkpoint, of which everything but the bytes is known from the start.
///
/// Life cycle: construct with the destination, the contents and the values (a std::vector<Value>
/// parallel to `contents.values`); `write_block` for every block of every piece of non-zero size;
/// `commit`. Destroyed without commit, nothing stands at the
/// destination. Equal contents and bytes give equal files whatever the number of threads, and
/// whether or not an earlier writer of the same work was gone on with (JournalOptions).
class CheckpointWriter {
 public:
  /// A piece by its place in the contents that the writer was made for.
  struct PieceId {
    std::size_t tensor_index;
    std::size_t piece_index;
  };

  virtual ~CheckpointWriter() = default;

  /// Returns the contents as they will be written.
  virtual const CheckpointContents& contents() const = 0;

  /// Returns the pieces of non-zero size in the order in which their bytes lie in the files: the
  /// order in which blocks must be started.
  virtual std::vector<PieceId> write_order() const = 0;

  /// Returns the elements in each block of that piece but the last, which may be shorter.
  virtual std::int64_t block_numel(PieceId piece) const = 0;

  /// Takes the block of the piece that starts at element `begin` (a multiple of `block_numel`), in
  /// the region's own row-major order, little-endian. Thread-safe. Blocks may be handed in by
  /// several threads at once, started in order; a writer that must keep the order waits inside.
  virtual void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) = 0;

  /// Takes the block as written if an earlier writer of the same work has finished it: reads it
  /// back, and checks it. Else returns false, and the block is to be handed in. In the same order
  /// as `write_block`, and like it thread-safe. Requires: `room` has the block's size.
  virtual bool resume_block(PieceId /*piece*/, std::int64_t /*begin*/,
                            std::span<std::byte> /*room*/) {
    return false;
  }

  /// Whether the work of an earlier writer is gone on with.
  virtual bool goes_on() const { return false; }
  /// Keeps what is finished, when this is destroyed without commit, for another writer to go on
  /// with. Returns whether there will be anything. What is gone on with is kept in any case.
  virtual bool keep_work() noexcept { return false; }

  /// Wakes every thread that waits inside `write_block` with Error(interrupted): called when some
  /// block will never come.
  virtual void abandon() noexcept = 0;

  /// Syncs and makes the checkpoint appear. Requires: every block written.
  virtual void commit() = 0;
};

}  // namespace tessera::formats
