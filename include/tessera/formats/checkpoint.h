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
#include "tessera/base/shared_text.h"
#include "tessera/base/shared_vector.h"
#include "tessera/base/tensor_meta.h"
#include "tessera/base/value.h"
#include "tessera/formats/format.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/layout/region.h"

namespace tessera::formats {

/// How a tensor's elements relate to a parameter. This decides how the tensor reshards.
/// Stored on disk; never renumber.
enum class StateKind : std::uint8_t {
  plain = 0,               // a parameter or buffer, not state of another tensor
  pointwise = 1,           // one element per element of its parameter (exp_avg)
  row_wise = 2,            // one element per row of its parameter (row-wise Adagrad)
  scalar_parameter = 3,    // one value per parameter (step)
  scalar_table = 4,        // one value per embedding table (iter)
  opaque = 5,              // moved as a whole, never cut
  row_wise_per_shard = 6,  // one block of rows per column shard (torchrec); merging is lossy
};

/// Returns the enumerator's name, such as `row_wise_per_shard`.
std::string_view state_kind_name(StateKind kind);

/// A dict key that is not a string, such as the numbers in the `state` of an optimizer.
struct NonStringKey {
  std::string json;  // the key as value_to_json writes it
  friend auto operator<=>(const NonStringKey&, const NonStringKey&) = default;
};

/// What leads one level down in a nested state dict: a string key of a dict, a position in a list,
/// or a key of a dict that is not a string.
using Key = std::variant<std::string, std::int64_t, NonStringKey>;

/// The keys that lead to an entry of the nested state dict, outermost first.
using KeyPath = std::vector<Key>;

/// A key path whose copies share memory, as the entries of a source and of a destination do.
using SharedKeyPath = SharedVector<Key>;

/// Returns a dict's key as a `Key`: a string or a NonStringKey; nothing if Python cannot hash it.
std::optional<Key> dict_key(const Value& key);

/// Undoes `dict_key`: returns the key as a Value. Requires: `dict_key` returned `key`.
Value dict_key_value(const NonStringKey& key);

/// Returns the flattened key of a path: the path's keys joined by dots, each key as Python's str()
/// writes it.
std::string spell(const KeyPath& path);

/// Returns the path as a list: strings and positions as they are, any other key as a list with this
/// key as its item.
Value key_path_to_value(const KeyPath& path);
/// Undoes `key_path_to_value`; returns nothing for any other value.
std::optional<KeyPath> key_path_from_value(const Value& value);

/// A region of a tensor together with the rank whose file holds it.
struct Piece {
  Region region;
  int rank = 0;
  friend bool operator==(const Piece&, const Piece&) = default;
};

// [Note: Order of keys] Lists of entries are sorted by name, which loses the order of the keys of a
// Python dict. Each entry keeps that order as a number, `dict_order`: of two keys of one dict, the
// key whose entries have the smallest number comes first. Keys with equal numbers are in the order
// of Key. A reader that knows no order gives every entry a 0. Numbers may have gaps, because a move
// leaves entries out.

/// A logical tensor with the pieces that cover it. Equal regions are replicas. Tensors of equal
/// shapes and cuts may share one list of pieces. The struct is kept small, because a move has two
/// entries for each tensor.
struct TensorEntry {
  TensorMeta meta;
  StateKind kind = StateKind::plain;
  std::uint32_t dict_order = 0;  // [Note: Order of keys]
  SharedText parameter{};        // of optimizer state: the fqn of its parameter; else empty
  SharedKeyPath key_path{};      // empty: the fqn is a top-level key
  SharedVector<Piece> pieces{};
};

/// A value that is not a tensor, under its flattened key.
struct ValueEntry {
  std::string name;
  SharedKeyPath key_path{};
  std::uint32_t dict_order = 0;  // [Note: Order of keys]
};

/// A second name of a tensor (tied weights). `target` is the fqn of a tensor, never of another
/// alias.
struct Alias {
  std::string fqn;
  std::string target;
  SharedKeyPath key_path{};
  std::uint32_t dict_order = 0;  // [Note: Order of keys]
};

/// A class whose objects a reader turned into entries or dicts. The reader ran no code of the
/// class.
struct OpenedClass {
  enum class As {
    dict,    // its attributes are entries, as OpenOptions::as_dict asked
    module,  // a torch.nn.Module: its parameters and buffers are entries, as in its state_dict()
  };
  std::string name;  // `argparse.Namespace`
  As as = As::dict;
  std::size_t num_objects = 0;  // of modules, only the outermost ones count

  friend bool operator==(const OpenedClass&, const OpenedClass&) = default;
};

/// Returns `opened` in words: `2 objects of class argparse.Namespace, read as dicts`.
std::string opened_class_in_words(const OpenedClass& opened);

/// Describes the opened path if it has only one part of a checkpoint that consists of several
/// parts.
struct PartOfWhole {
  /// What one part contains.
  enum class Unit {
    rank,  // what one process saved
    file,  // one of the several files of a model
  };

  Unit unit = Unit::rank;
  std::string form{};                        // `DeepSpeed ZeRO stage 2, optimizer state`
  std::optional<std::uint64_t> num_parts{};  // empty: the part does not say how many
  std::string series{};      // a numbered file's path before the number; empty: no number
  std::uint64_t number = 0;  // of the file in its series, from 1

  friend bool operator==(const PartOfWhole&, const PartOfWhole&) = default;
};

/// Returns `part` in words: `one rank of 8: DeepSpeed ZeRO stage 2, optimizer state`.
std::string part_in_words(const PartOfWhole& part);

/// One result of a check. Rules are stable words, such as `checksum`, `coverage`, `structure`; all
/// of them are in docs/cli/ckpt-inspect.md.
struct Finding {
  /// A note does not make a checkpoint invalid.
  enum class Severity { note, error } severity = Severity::error;
  std::string rule;
  ErrorWhere where;
  std::string expected;
  std::string found;
  Remedy remedy{};  // what the caller can do about it
};

/// Something in the source for which CheckpointContents has no place, so the reader made it
/// simpler.
struct Simplification {
  enum class Kind {
    requires_grad,  // of a tensor: dropped
    parameter,      // a torch.nn.Parameter: read as a tensor
    shared_memory,  // a tensor that shares memory with another one: read as a separate tensor
    dict_class,     // an OrderedDict, defaultdict or Counter: read as a dict
    tuple,          // a tuple with a tensor in it: read as a list
    attributes,     // attributes that a program set on a tensor or an OrderedDict: dropped
    value_type,     // a frozenset, torch.Size or the like in a value: read as a plainer type
  };
  Kind kind;
  std::string name;  // of the tensor; of a container: the start of its entries' names
  std::vector<std::string> what{};  // names of attributes (the first ones), or of types

  friend bool operator==(const Simplification&, const Simplification&) = default;
};

/// All that a checkpoint holds except tensor data: what a reader found, or what a writer is to
/// write. Lists are sorted by name (byte order). No name occurs twice, neither in one list nor in
/// two lists.
struct CheckpointContents {
  int world_size = 1;
  std::vector<TensorEntry> tensors{};
  std::vector<ValueEntry> values{};
  std::vector<Alias> aliases{};
  std::vector<FlatUnit> units{};                     // flat parameters; empty if not known
  std::map<std::string, std::string> annotations{};  // free text stored with the checkpoint
  std::vector<std::string> missing_files{};          // named by the checkpoint, but missing
  std::vector<OpenedClass> opened_classes{};         // what a reader found, sorted by name
  std::optional<PartOfWhole> part{};                 // set by a reader: only a part is here
  std::vector<Simplification> simplifications{};     // what a reader made simpler
  /// Problems and notes that a reader found while it opened the checkpoint, and that every user
  /// should know. If the list has errors, a move is refused, unless the move may leave out what is
  /// missing.
  std::vector<Finding> opening_findings{};

  const TensorEntry* find_tensor(std::string_view fqn) const;  // nullptr for an alias
};

/// Where a piece's bytes are stored, to show to people.
struct PieceStorage {
  std::string file;                     // relative to the checkpoint; in a merge, its whole path
  std::optional<ByteRange> byte_range;  // empty if the piece is not one range of the file
  std::string encoding;                 // `plain`, `zstd`, `big-endian`, `patched`
  std::uint64_t stored_nbytes = 0;
};

/// The pieces and values whose files are missing, each with the name of its file.
struct MissingData {
  using Pieces = std::map<std::size_t, std::string>;  // key: index of the piece

  std::map<std::size_t, Pieces> pieces{};       // key: index of the tensor; only non-empty pieces
  std::map<std::size_t, std::string> values{};  // key: index of the value
};

/// Returns a finding as an Error(mismatch): `<where>: <rule>: expected <x>, found <y> (<remedy>)`.
Error finding_to_error(const Finding& finding);
/// Returns the finding as one line. The remedy is written for C++ callers: `CreateOptions::...`.
std::string finding_to_string(const Finding& finding);

/// Receives the findings one by one.
using FindingSink = std::function<void(const Finding&)>;

/// Receives the number of bytes just processed. Several threads may call it at the same time.
using ProgressSink = std::function<void(std::uint64_t nbytes)>;

/// Tensors whose bytes can be read piece by piece: from an open checkpoint, or from a trainer's
/// memory. The source of a move. Thread-safe.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  /// Returns the contents. They live as long as this object.
  virtual const CheckpointContents& contents() const = 0;

  /// Fills `out` with elements `[range.begin, range.end)` of one piece, in the piece region's own
  /// row-major order, little-endian. Checks every stored checksum that covers what it reads.
  /// Requires: `out.size() == range.numel() * itemsize`.
  /// Throws: Error(corruption) with file, tensor and byte range; Error(io).
  virtual void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                          std::span<std::byte> out) const = 0;
};

/// An open checkpoint. Everything is read-only and thread-safe after opening; files are opened when
/// first needed. `contents()` has passed these checks: dtypes known, shapes bounded, regions inside
/// their tensor, names unique. Coverage is not checked, so that a checkpoint with holes can still
/// be inspected; the caller checks it with `check_coverage`.
class CheckpointReader : public TensorSource {
 public:
  /// Returns the checkpoint's format; for a merge, the format of the first source.
  virtual Format format() const = 0;
  /// Returns the path that was opened.
  virtual const std::string& path() const = 0;

  /// Returns names of tensors and aliases in the order that their state dict had: one list for the
  /// checkpoint, or one for each source of a merge. Has no names if the order is not known.
  virtual std::vector<std::vector<std::string>> dict_orders() const { return {}; }

  /// Returns the value stored under `contents().values[value_index]`.
  virtual Value read_value(std::size_t value_index) const = 0;

  /// Returns where the bytes of a piece are stored. `piece_index` counts within the tensor.
  virtual PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const = 0;

  /// Checks that every file named by the checkpoint exists, has the right size, and belongs to the
  /// checkpoint as far as the format can tell. Reads no tensor data. Continues after a finding
  /// where it can.
  /// Throws: Error(io).
  virtual void check_files(const FindingSink& sink) const = 0;

  /// Returns the paths of the files that hold tensor bytes, as FileSystem::open takes them. A file
  /// in the list may be missing. Empty if the bytes are in memory.
  virtual std::vector<std::string> data_files() const = 0;

  /// Returns the pieces and values whose files are missing. Opens no file. Empty for formats whose
  /// reader does not open a checkpoint with a missing file.
  /// Throws: Error(io).
  virtual MissingData find_missing_data() const { return {}; }

  /// Checks the checkpoint as far as its format allows: every stored byte that has a checksum, the
  /// structure, and whether all files exist. May skip what opening has checked. Continues after a
  /// finding where it can. At most `num_threads` threads read; 0: default_num_threads(). Findings
  /// do not depend on the number of threads. Requires: `sink` and `progress` are not empty.
  virtual void verify(const FindingSink& sink, const ProgressSink& progress,
                      int num_threads) const = 0;
  void verify(const FindingSink& sink, const ProgressSink& progress) const {
    verify(sink, progress, 0);
  }
};

/// The writer of one checkpoint. It knows everything except the tensors' bytes from the start.
///
/// Life cycle: construct with the destination, the contents and the values (a std::vector<Value>
/// parallel to `contents.values`); `write_block` for every block of every piece of non-zero size;
/// `commit`. If the writer is destroyed without commit, nothing appears at the destination. Equal
/// contents and bytes give equal files, for any number of threads, and whether or not the work was
/// interrupted and resumed (JournalOptions).
class CheckpointWriter {
 public:
  /// Names a piece by its place in the writer's contents. 8 bytes, because a large checkpoint has
  /// millions of pieces. No memory holds 2^32 tensors, or 2^32 pieces of one tensor.
  struct PieceId {
    std::uint32_t tensor_index = 0;
    std::uint32_t piece_index = 0;

    PieceId() = default;
    PieceId(std::size_t tensor, std::size_t piece)
        : tensor_index(static_cast<std::uint32_t>(tensor)),
          piece_index(static_cast<std::uint32_t>(piece)) {
      TESSERA_CHECK(tensor_index == tensor && piece_index == piece);
    }
    friend auto operator<=>(const PieceId&, const PieceId&) = default;
  };

  virtual ~CheckpointWriter() = default;

  /// Returns the contents as they will be written.
  virtual const CheckpointContents& contents() const = 0;

  /// Returns the pieces of non-zero size in the order of their bytes in the files. Blocks must be
  /// started in this order. The view is valid until `commit`.
  virtual std::span<const PieceId> write_order() const = 0;

  /// Returns the number of elements in each block of `piece`; the last block may have fewer.
  virtual std::int64_t block_numel(PieceId piece) const = 0;

  /// Takes one block of a piece: the elements from `begin` (a multiple of `block_numel`) on, in the
  /// region's own row-major order, little-endian. Thread-safe. Several threads may call at once, if
  /// they start blocks in order; a writer that needs the order makes threads wait.
  virtual void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) = 0;

  /// Takes the block from the files of an interrupted writer of the same work, if it is there and
  /// its checksum is right, and returns true. If false, the caller must pass it to `write_block`.
  /// Same order and thread-safety as `write_block`. Requires: `room` has the block's size. The
  /// writer uses `room` only as a buffer: after the call it need not hold the block.
  virtual bool resume_block(PieceId /*piece*/, std::int64_t /*begin*/,
                            std::span<std::byte> /*room*/) {
    return false;
  }

  /// Whether this writer resumes the work of an interrupted writer.
  virtual bool is_resumed() const { return false; }
  /// Keeps the finished blocks for another writer to resume, if this one is destroyed without
  /// commit (a resumed one always does). Returns whether there are any; false without a journal.
  virtual bool keep_work() noexcept { return false; }

  /// Makes every thread that waits inside `write_block` or `resume_block` throw Error(interrupted).
  /// Call it when a block will never be written.
  virtual void abandon() noexcept = 0;

  /// Syncs and makes the checkpoint appear. Requires: every block was written.
  virtual void commit() = 0;
};

}  // namespace tessera::formats
