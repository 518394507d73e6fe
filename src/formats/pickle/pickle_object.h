#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/pickle/pickle_bytes.h"
#include "tessera/base/error.h"

namespace tessera::formats::pickle {

/// The kinds of object in a pickle. A pickle is a program; Tessera records what it says and
/// executes nothing, so a "call" is a name with arguments.
enum class ObjectKind : std::uint8_t {
  none,
  boolean,
  integer,      // fits into int64_t
  big_integer,  // does not fit into int64_t
  floating,
  str,
  bytes,  // also bytearray
  list,
  tuple,
  dict,
  set,         // also frozenset
  global,      // a name, of the allow-list or foreign
  call,        // REDUCE, NEWOBJ, …: a global, its arguments, and items that are added later
  persistent,  // BINPERSID: a reference to something outside the pickle, such as a storage
};

std::string_view kind_name(ObjectKind kind);

class ObjectGraph;

namespace detail {

inline constexpr std::uint32_t kNoObject = 0xffffffff;

struct Text {
  const char* data;
  std::uint32_t nbytes;
  std::string_view view() const { return {data, nbytes}; }
};

struct Slice {  // of ObjectGraph::links_
  std::uint32_t begin = 0;
  std::uint32_t size = 0;
  std::uint32_t capacity = 0;
};

struct Global {
  Text module;
  Text name;
  std::uint32_t meaning;
};

struct Call {
  std::uint32_t callable;
  std::uint32_t arguments;
  std::uint32_t state = kNoObject;  // no BUILD
  Slice appended{};
  Slice entries{};
};

struct Node {
  ObjectKind kind;
  bool is_instance = false;  // a call by an opcode that exists only for classes
  bool is_variant = false;  // bytes: a bytearray; set: a frozenset; list: moved into an OrderedDict
  std::uint32_t offset;     // of the opcode that made the object; kNoObject for shared constants
  union {
    bool boolean;
    std::int64_t integer;
    double floating;
    Text text;            // str, bytes, big_integer
    Slice slice;          // list, tuple, set: items; dict: key, value, key, value, ...
    std::uint32_t index;  // global: globals_; call: calls_; persistent: the id's node
  };
};

}  // namespace detail

/// A reference to one object of a graph (two words). Valid while the graph lives. Functions with a
/// `rule` throw Error(corruption) naming the file and the byte at which the object was made:
/// `<rule>: expected <kind>, found <describe()>`. No function looks deeper than one level, so that
/// no graph costs more than its size, even with shared objects or cycles.
class Object {
 public:
  ObjectKind kind() const;
  bool is(ObjectKind wanted) const { return kind() == wanted; }

  bool as_boolean(std::string_view rule) const;
  std::int64_t as_integer(std::string_view rule) const;
  double as_floating(std::string_view rule) const;
  /// Returns valid UTF-8. Throws Error(unsupported) if the text has a surrogate.
  std::string_view as_str(std::string_view rule) const;
  /// Returns text that may have surrogates, written as Python's `surrogatepass` does.
  std::string_view as_text(std::string_view rule) const;
  std::string_view as_bytes(std::string_view rule) const;
  std::string_view as_big_integer(std::string_view rule) const;  // decimal digits
  /// Returns the number of items of a list, a tuple or a set.
  std::size_t num_items(std::string_view rule) const;
  Object item(std::size_t index) const;  // Requires: index < num_items
  /// Returns the number of entries of a dict, or of the entries that the pickle adds to the result
  /// of a call (such as `OrderedDict()`). A key that is a str, bytes, a number or None appears
  /// once, with the value that was set last. Other keys may be repeated.
  std::size_t num_entries(std::string_view rule) const;
  Object entry_key(std::size_t index) const;  // Requires: index < num_entries
  Object entry_value(std::size_t index) const;
  /// Returns the value under a str key; nothing if a dict lacks it. Cost: linear in the entries.
  std::optional<Object> find(std::string_view key) const;

  std::string_view global_module(std::string_view rule) const;
  std::string_view global_name(std::string_view rule) const;
  /// Returns the allow-list's number for this global, or for the global that this call calls.
  /// Returns kForeignMeaning or kAsDictMeaning if the list lacks the global.
  std::uint32_t meaning(std::string_view rule) const;

  Object call_arguments(std::string_view rule) const;  // a tuple
  /// Returns the state that BUILD sets on the call's result; nothing without BUILD. After several
  /// BUILDs of a foreign call: a tuple of what the earlier ones set together, and the last state.
  std::optional<Object> call_state(std::string_view rule) const;
  /// Says whether the call comes from an opcode that exists only for classes: NEWOBJ, OBJ, INST,
  /// NEWOBJ_EX.
  bool is_instance() const { return node().is_instance; }
  /// Says whether an object of kind `bytes` is a bytearray, or one of kind `set` a frozenset. The
  /// opcode that made the object shows this.
  bool is_variant() const { return node().is_variant; }
  std::size_t num_appended(std::string_view rule) const;  // items added to a call
  Object appended(std::size_t index) const;
  Object persistent_id(std::string_view rule) const;

  /// Says whether both are the same object of the graph.
  friend bool operator==(const Object&, const Object&) = default;
  std::uint32_t id() const { return id_; }  // dense, below ObjectGraph::num_objects()

  /// Returns an error with the text `what`, the file and this object's place.
  Error error(ErrorKind error_kind, std::string_view what) const;
  /// Throws what `error` returns.
  [[noreturn]] void fail(ErrorKind error_kind, std::string_view what) const;
  /// Throws Error(corruption): `<rule>: expected <expected>, found <describe()>`.
  [[noreturn]] void fail_expected(std::string_view rule, std::string_view expected) const;
  /// Says briefly what the object is: `int 7`, `str 'abc'`, `list of 3`, a call: `torch.Size(...)`.
  std::string describe() const;

 private:
  friend class ObjectGraph;
  friend class Machine;
  Object(const ObjectGraph* graph, std::uint32_t id) : graph_(graph), id_(id) {}

  const detail::Node& node() const;
  const detail::Node& node(ObjectKind wanted, std::string_view rule) const;
  const detail::Call& call(std::string_view rule) const;
  const detail::Slice& entries(std::string_view rule) const;
  const detail::Global& named_global(std::string_view rule) const;
  Object link(const detail::Slice& slice, std::size_t index) const;

  const ObjectGraph* graph_;
  std::uint32_t id_;
};

/// Everything that one pickle describes, as read by `unpickle`. Owns the pickle's bytes, which
/// strings refer to. Immutable and safe to share between threads. Moving the graph invalidates its
/// Objects, so get them only when the graph is at its final place.
class ObjectGraph {
 public:
  ObjectGraph(ObjectGraph&&) noexcept = default;
  ObjectGraph& operator=(ObjectGraph&&) noexcept = default;

  Object root() const { return Object(this, root_); }
  std::size_t num_objects() const { return nodes_.size(); }
  /// Requires: id < num_objects().
  Object object(std::size_t id) const { return Object(this, static_cast<std::uint32_t>(id)); }
  std::size_t nbytes() const { return bytes_.size(); }  // of the pickle
  const std::string& path() const { return path_; }

 private:
  friend class Object;
  friend class Machine;

  ObjectGraph() = default;

  std::string path_;
  std::uint64_t file_offset_ = 0;
  PickleBytes bytes_;
  std::deque<std::string> decoded_;  // decoded text that is not in bytes_
  TextStore kept_;  // text of objects that outlived their bytes [Note: Entries taken early]
  std::vector<detail::Node> nodes_;
  std::vector<std::uint32_t> links_;
  std::vector<detail::Global> globals_;
  std::vector<detail::Call> calls_;
  std::uint32_t root_ = 0;
};

// Inline: a walk through a large graph makes millions of these calls.

inline const detail::Node& Object::node() const {
  return graph_->nodes_[id_];
}

inline const detail::Node& Object::node(ObjectKind wanted, std::string_view rule) const {
  const detail::Node& found = node();
  if (found.kind != wanted) fail_expected(rule, kind_name(wanted));
  return found;
}

inline const detail::Call& Object::call(std::string_view rule) const {
  return graph_->calls_[node(ObjectKind::call, rule).index];
}

inline const detail::Slice& Object::entries(std::string_view rule) const {
  if (is(ObjectKind::call)) return call(rule).entries;
  return node(ObjectKind::dict, rule).slice;
}

inline const detail::Global& Object::named_global(std::string_view rule) const {
  const Object global = is(ObjectKind::call) ? Object(graph_, call(rule).callable) : *this;
  return graph_->globals_[global.node(ObjectKind::global, rule).index];
}

inline Object Object::link(const detail::Slice& slice, std::size_t index) const {
  TESSERA_CHECK(index < slice.size);
  return Object(graph_, graph_->links_[slice.begin + index]);
}

inline ObjectKind Object::kind() const {
  return node().kind;
}

inline std::int64_t Object::as_integer(std::string_view rule) const {
  return node(ObjectKind::integer, rule).integer;
}

inline std::string_view Object::as_text(std::string_view rule) const {
  return node(ObjectKind::str, rule).text.view();
}

inline std::size_t Object::num_items(std::string_view rule) const {
  if (!is(ObjectKind::list) && !is(ObjectKind::tuple) && !is(ObjectKind::set)) {
    fail_expected(rule, "list, tuple or set");
  }
  return node().slice.size;
}

inline Object Object::item(std::size_t index) const {
  return link(node().slice, index);
}

inline std::size_t Object::num_entries(std::string_view rule) const {
  return entries(rule).size / 2;
}

inline Object Object::entry_key(std::size_t index) const {
  return link(entries("entry"), 2 * index);
}

inline Object Object::entry_value(std::size_t index) const {
  return link(entries("entry"), 2 * index + 1);
}

inline std::uint32_t Object::meaning(std::string_view rule) const {
  return named_global(rule).meaning;
}

inline Object Object::call_arguments(std::string_view rule) const {
  return Object(graph_, call(rule).arguments);
}

inline std::optional<Object> Object::call_state(std::string_view rule) const {
  const std::uint32_t state = call(rule).state;
  if (state == detail::kNoObject) return std::nullopt;
  return Object(graph_, state);
}

}  // namespace tessera::formats::pickle
