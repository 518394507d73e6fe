#include "formats/pickle/unpickler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "base/utf8.h"
#include "formats/pickle/text.h"

namespace tessera::formats::pickle {

using detail::Call;
using detail::kNoObject;
using detail::Node;
using detail::Slice;
using detail::Text;

AllowList::AllowList(std::initializer_list<std::span<const AllowedGlobal>> tables) {
  for (const std::span<const AllowedGlobal> table : tables) {
    for (const AllowedGlobal& global : table) {
      if (global.name == "*") {
        prefixes_.push_back(global);
      } else {
        exact_.emplace(std::string(global.module) + '\n' + std::string(global.name),
                       global.meaning);
      }
    }
  }
}

std::optional<std::uint32_t> AllowList::find(std::string_view module, std::string_view name) const {
  std::string key(module);
  key += '\n';  // in no listed name
  key += name;
  if (const auto found = exact_.find(key); found != exact_.end()) return found->second;
  for (const AllowedGlobal& prefix : prefixes_) {
    if (module.substr(0, prefix.module.size()) != prefix.module) continue;
    const std::string_view rest = module.substr(prefix.module.size());
    if (rest.empty() || rest.front() == '.') return prefix.meaning;
  }
  return std::nullopt;
}

/// The machine that the opcodes drive: a stack of objects, marks on it, and a memo. Every opcode
/// costs time and memory in proportion to its own bytes or to the objects that it takes off the
/// stack, and each of those was put there by an opcode.
class Machine {
 public:
  Machine(std::vector<char> bytes, PickleSource source, const AllowList& allowed,
          PickleLimits limits)
      : allowed_(allowed), limits_(limits) {
    graph_.path_ = std::move(source.path);
    graph_.file_offset_ = source.file_offset;
    graph_.bytes_ = std::move(bytes);
    nbytes_ = graph_.bytes_.size();
    // What a pickle of this size mostly becomes, so that little is moved while it grows.
    const std::size_t expected_nbytes = std::min<std::size_t>(nbytes_, std::size_t{1} << 25);
    graph_.nodes_.reserve(expected_nbytes / 5);
    graph_.links_.reserve(expected_nbytes / 5);
    graph_.calls_.reserve(expected_nbytes / 20);
    memo_.reserve(expected_nbytes / 5);
  }

  ObjectGraph run() {
    if (nbytes_ > limits_.max_nbytes) {
      fail_expected(ErrorKind::corruption, "pickle size",
                    "at most " + std::to_string(limits_.max_nbytes) + " bytes",
                    std::to_string(nbytes_));
    }
    while (!stopped_) {
      opcode_position_ = position_;
      step(take_byte("opcode"));
    }
    if (position_ != nbytes_) {
      opcode_position_ = position_;
      fail_expected(ErrorKind::corruption, "bytes after STOP", "0",
                    std::to_string(nbytes_ - position_));
    }
    for (Node& node : graph_.nodes_) {
      if (node.kind == ObjectKind::dict) unite_equal_keys(node.slice);
    }
    for (Call& call : graph_.calls_) unite_equal_keys(call.entries);
    return std::move(graph_);
  }

 private:
  // Failure

  [[noreturn]] void fail(ErrorKind kind, const std::string& what) const {
    const std::uint64_t begin = graph_.file_offset_ + opcode_position_;
    throw Error(kind,
                {.path = graph_.path_,
                 .byte_range = ByteRange{begin, graph_.file_offset_ +
                                                    std::max(position_, opcode_position_ + 1)}},
                "pickle: " + what);
  }
  [[noreturn]] void fail_expected(ErrorKind kind, const std::string& rule,
                                  const std::string& expected, const std::string& found,
                                  const std::string& likely_cause = {}) const {
    fail(kind, rule + ": expected " + expected + ", found " + found +
                   (likely_cause.empty() ? "" : " (" + likely_cause + ")"));
  }
  [[noreturn]] void refuse_opcode(const char* name) const {
    fail(ErrorKind::unsupported,
         std::string("opcode ") + name + " is not in the allow-list; nothing was executed");
  }

  // Input

  std::string_view take(std::uint64_t nbytes, const char* what) {
    if (nbytes > nbytes_ - position_) {
      fail_expected(ErrorKind::corruption, what, std::to_string(nbytes) + " bytes",
                    std::to_string(nbytes_ - position_), "cut short?");
    }
    const std::string_view taken(graph_.bytes_.data() + position_, nbytes);
    position_ += nbytes;
    return taken;
  }
  unsigned char take_byte(const char* what) {
    return static_cast<unsigned char>(take(1, what).front());
  }
  template <std::unsigned_integral T>
  T take_little_endian(const char* what) {
    return little_endian<T>(take(sizeof(T), what));
  }
  template <std::unsigned_integral T>
  static T little_endian(std::string_view bytes) {
    T value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value =
          static_cast<T>(value | static_cast<T>(static_cast<unsigned char>(bytes[i])) << (8 * i));
    }
    return value;
  }
  std::string_view take_line(const char* what) {
    const std::string_view rest(graph_.bytes_.data() + position_, nbytes_ - position_);
    const std::size_t end = rest.find('\n');
    if (end == std::string_view::npos) {
      fail_expected(ErrorKind::corruption, what, "a line", "no end of line", "cut short?");
    }
    position_ += end + 1;
    return rest.substr(0, end);
  }

  // Objects

  std::uint32_t make(ObjectKind kind) {
    graph_.nodes_.push_back(
        Node{.kind = kind, .offset = static_cast<std::uint32_t>(opcode_position_), .integer = 0});
    return static_cast<std::uint32_t>(graph_.nodes_.size() - 1);
  }
  void push(std::uint32_t id) {
    if (++num_pushed_ > limits_.max_objects) {
      fail_expected(ErrorKind::corruption, "objects in one pickle",
                    "at most " + std::to_string(limits_.max_objects), "more");
    }
    stack_.push_back(id);
  }
  Node& push_new(ObjectKind kind) {
    push(make(kind));
    return graph_.nodes_.back();
  }
  void push_constant(std::uint32_t& id, ObjectKind kind, bool boolean = false) {
    if (id == kNoObject) {
      id = make(kind);
      graph_.nodes_[id].offset = kNoObject;
      if (kind == ObjectKind::boolean) graph_.nodes_[id].boolean = boolean;
      if (kind == ObjectKind::tuple) graph_.nodes_[id].slice = Slice{};
    }
    push(id);
  }
  void push_boolean(bool value) {
    push_constant(value ? true_ : false_, ObjectKind::boolean, value);
  }
  void push_integer(std::int64_t value) { push_new(ObjectKind::integer).integer = value; }
  void push_floating(double value) { push_new(ObjectKind::floating).floating = value; }
  void push_empty(ObjectKind kind) { push_new(kind).slice = Slice{}; }
  void push_bytes(std::string_view text) { push_new(ObjectKind::bytes).text = text_of(text); }
  void push_str(std::string_view text) {
    if (!::tessera::detail::is_valid_python_str(text))
      fail(ErrorKind::corruption, "str: expected UTF-8, found other bytes");
    push_new(ObjectKind::str).text = text_of(text);
  }
  /// Python 2 had one type for both.
  void push_str_or_bytes(std::string_view text) {
    ::tessera::detail::is_valid_utf8(text) ? push_str(text) : push_bytes(text);
  }
  Text text_of(std::string_view text) const {
    return Text{text.data(), static_cast<std::uint32_t>(text.size())};
  }
  std::string_view keep(std::string text) { return graph_.decoded_.emplace_back(std::move(text)); }

  void push_long(std::string_view twos_complement) {
    if (twos_complement.size() <= sizeof(std::int64_t)) {
      std::uint64_t value = 0;
      for (std::size_t i = 0; i < twos_complement.size(); ++i) {
        value |= std::uint64_t{static_cast<unsigned char>(twos_complement[i])} << (8 * i);
      }
      const std::size_t width = 8 * twos_complement.size();
      if (width > 0 && width < 64 && (value >> (width - 1)) != 0)
        value |= ~std::uint64_t{0} << width;
      return push_integer(static_cast<std::int64_t>(value));
    }
    check_big_integer(twos_complement.size());
    push_decimal(decimal_of(twos_complement));
  }
  void check_big_integer(std::uint64_t nbytes) const {
    if (nbytes <= limits_.max_big_integer_nbytes) return;
    fail_expected(ErrorKind::unsupported, "integer size",
                  "at most " + std::to_string(limits_.max_big_integer_nbytes) + " bytes",
                  std::to_string(nbytes));
  }
  void push_decimal(std::string_view decimal) {
    std::int64_t value = 0;
    const auto [end, error] =
        std::from_chars(decimal.data(), decimal.data() + decimal.size(), value);
    if (error == std::errc{} && end == decimal.data() + decimal.size()) return push_integer(value);
    const std::string_view digits = decimal.substr(decimal.substr(0, 1) == "-" ? 1 : 0);
    check_big_integer(digits.size() / 3);  // 2.4 digits a byte
    if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos) {
      fail_expected(ErrorKind::corruption, "integer", "decimal digits",
                    "'" + printable(decimal, 40) + "'");
    }
    const std::string_view kept = keep(canonical_decimal(decimal));
    push_new(ObjectKind::big_integer).text = text_of(kept);
  }

  // Stack

  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  std::uint32_t pop() {
    if (stack_.size() == floor())
      fail(ErrorKind::corruption, "stack: expected an object, found none");
    const std::uint32_t id = stack_.back();
    stack_.pop_back();
    return id;
  }
  std::uint32_t top() const {
    if (stack_.size() == floor())
      fail(ErrorKind::corruption, "stack: expected an object, found none");
    return stack_.back();
  }
  /// Takes off the last mark and returns where the objects above it begin; they stay.
  std::size_t pop_mark() {
    if (marks_.empty()) fail(ErrorKind::corruption, "stack: expected a MARK, found none");
    const std::size_t begin = marks_.back();
    marks_.pop_back();
    return begin;
  }
  std::span<const std::uint32_t> above(std::size_t begin) const {
    return std::span(stack_).subspan(begin);
  }
  const Node& node(std::uint32_t id) const { return graph_.nodes_[id]; }
  std::string describe(std::uint32_t id) const { return Object(&graph_, id).describe(); }

  /// Adds to a slice, moving it to the end with room to grow where something follows it.
  void append(Slice& slice, std::span<const std::uint32_t> ids) {
    if (ids.empty()) return;
    std::vector<std::uint32_t>& links = graph_.links_;
    const std::uint64_t needed = std::uint64_t{slice.size} + ids.size();
    if (needed > slice.capacity) {
      if (std::uint64_t{slice.begin} + slice.capacity == links.size() && slice.capacity > 0) {
        links.resize(slice.begin + needed, kNoObject);
        slice.capacity = static_cast<std::uint32_t>(needed);
      } else {
        const std::uint64_t capacity =
            slice.capacity == 0
                ? needed
                : std::max<std::uint64_t>(needed, 2 * std::uint64_t{slice.capacity});
        const std::size_t begin = links.size();
        links.resize(begin + capacity, kNoObject);
        std::copy_n(links.begin() + slice.begin, slice.size,
                    links.begin() + static_cast<std::ptrdiff_t>(begin));
        slice.begin = static_cast<std::uint32_t>(begin);
        slice.capacity = static_cast<std::uint32_t>(capacity);
      }
    }
    std::copy(ids.begin(), ids.end(), links.begin() + slice.begin + slice.size);
    slice.size += static_cast<std::uint32_t>(ids.size());
  }

  void append_items(std::uint32_t target, std::span<const std::uint32_t> items, ObjectKind wanted) {
    Node& self = graph_.nodes_[target];
    if (self.kind == wanted) return append(self.slice, items);
    if (self.kind == ObjectKind::call) return append(graph_.calls_[self.index].appended, items);
    fail_expected(ErrorKind::corruption, "append to", std::string(kind_name(wanted)),
                  describe(target));
  }
  void set_items(std::uint32_t target, std::span<const std::uint32_t> keys_and_values) {
    if (keys_and_values.size() % 2 != 0) {
      fail(ErrorKind::corruption, "dict entries: expected pairs, found an odd number of objects");
    }
    Node& self = graph_.nodes_[target];
    if (self.kind == ObjectKind::dict) return append(self.slice, keys_and_values);
    if (self.kind == ObjectKind::call)
      return append(graph_.calls_[self.index].entries, keys_and_values);
    fail_expected(ErrorKind::corruption, "set items of", "dict", describe(target));
  }
  void push_collection(ObjectKind kind, std::size_t begin) {
    Slice slice;
    append(slice, above(begin));
    stack_.resize(begin);
    push_new(kind).slice = slice;
  }
  void push_tuple_of(std::size_t num_items) {
    if (stack_.size() - floor() < num_items) {
      fail_expected(ErrorKind::corruption, "stack", std::to_string(num_items) + " objects",
                    std::to_string(stack_.size() - floor()));
    }
    push_collection(ObjectKind::tuple, stack_.size() - num_items);
  }

  void push_global(std::string_view module, std::string_view name) {
    const std::optional<std::uint32_t> meaning = allowed_.find(module, name);
    if (!meaning) {
      const bool is_module = module.substr(0, 9) == "torch.nn." || module == "__main__";
      fail(ErrorKind::unsupported,
           "foreign global " + printable(module, 80) + "." + printable(name, 80) +
               ": not in the allow-list; nothing was executed" +
               (is_module ? " (a whole module was saved? save its state_dict())" : ""));
    }
    graph_.globals_.push_back({text_of(module), text_of(name), *meaning});
    push_new(ObjectKind::global).index = static_cast<std::uint32_t>(graph_.globals_.size() - 1);
  }
  void push_call(const char* opcode) {
    const std::uint32_t arguments = pop();
    const std::uint32_t callable = pop();
    if (node(callable).kind != ObjectKind::global) {
      fail_expected(ErrorKind::corruption, std::string(opcode) + " callable", "global",
                    describe(callable));
    }
    if (node(arguments).kind != ObjectKind::tuple) {
      fail_expected(ErrorKind::corruption, std::string(opcode) + " arguments", "tuple",
                    describe(arguments));
    }
    graph_.calls_.push_back(Call{.callable = callable, .arguments = arguments});
    push_new(ObjectKind::call).index = static_cast<std::uint32_t>(graph_.calls_.size() - 1);
  }
  void build() {
    const std::uint32_t state = pop();
    const Node& self = node(top());
    if (self.kind != ObjectKind::call) {
      fail_expected(ErrorKind::corruption, "BUILD of", "object", describe(top()));
    }
    graph_.calls_[self.index].state = state;
  }

  // Memo

  void put(std::uint64_t slot) {
    const std::uint32_t id = top();
    // A slot takes at least one opcode to fill, and picklers number them from 0.
    if (slot >= nbytes_) {
      fail_expected(ErrorKind::corruption, "memo slot", "below " + std::to_string(nbytes_),
                    std::to_string(slot));
    }
    if (slot >= memo_.size())
      memo_.resize(std::max<std::size_t>(slot + 1, std::min(2 * memo_.size(), nbytes_)), kNoObject);
    if (memo_[slot] == kNoObject) ++num_memoized_;
    memo_[slot] = id;
  }
  void get(std::uint64_t slot) {
    if (slot >= memo_.size() || memo_[slot] == kNoObject) {
      fail_expected(ErrorKind::corruption, "memo slot", "one that was set",
                    "slot " + std::to_string(slot) + " unset");
    }
    push(memo_[slot]);
  }
  std::uint64_t take_slot_line() {
    const std::string_view line = take_line("memo slot");
    std::uint64_t slot = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), slot);
    if (error != std::errc{} || end != line.data() + line.size()) {
      fail_expected(ErrorKind::corruption, "memo slot", "decimal digits",
                    "'" + printable(line, 40) + "'");
    }
    return slot;
  }

  // Text opcodes of protocol 0

  void push_int_line() {
    const std::string_view line = take_line("integer");
    if (line == "00") return push_boolean(false);
    if (line == "01") return push_boolean(true);
    push_decimal(line);
  }
  void push_long_line() {
    std::string_view line = take_line("integer");
    if (!line.empty() && line.back() == 'L') line.remove_suffix(1);
    push_decimal(line);
  }
  void push_float_line() {
    const std::string_view line = take_line("float");
    double value = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
    if (error != std::errc{} || end != line.data() + line.size()) {
      fail_expected(ErrorKind::corruption, "float", "a number", "'" + printable(line, 40) + "'");
    }
    push_floating(value);
  }
  void push_string_line() {
    const std::string_view line = take_line("string");
    if (line.size() < 2 || line.front() != line.back() ||
        (line.front() != '\'' && line.front() != '"')) {
      fail(ErrorKind::corruption, "string: expected quotes around it, found none");
    }
    push_unescaped(unescape_python_string(line.substr(1, line.size() - 2)));
  }
  void push_unescaped(std::optional<std::string> text) {
    if (!text)
      fail(ErrorKind::corruption, "string: expected Python escapes, found a malformed one");
    push_str_or_bytes(keep(std::move(*text)));
  }
  void push_unicode_line() {
    std::optional<std::string> text = unescape_raw_unicode(take_line("str"));
    if (!text) fail(ErrorKind::corruption, "str: expected \\u escapes, found a malformed one");
    push_str(keep(std::move(*text)));
  }

  void step(unsigned char opcode);

  // Keys

  // Orders keys so that equal ones stand together; those of other kinds are equal to themselves
  // only.
  struct Key {
    enum class Kind : std::uint8_t { integer, floating, big_integer, str, bytes, none, other };
    Kind kind = Kind::other;
    std::uint64_t hash = 0;  // or the number's bits
    std::string_view text{};
    std::uint32_t entry = 0;

    bool same(const Key& other) const {
      return kind != Kind::other && kind == other.kind && hash == other.hash && text == other.text;
    }
  };
  Key key_of(std::uint32_t id, std::uint32_t entry) const {
    const Node& self = node(id);
    Key key{.entry = entry};
    const auto integer = [&key](std::int64_t value) {
      key.kind = Key::Kind::integer;
      key.hash = static_cast<std::uint64_t>(value);
    };
    switch (self.kind) {
      case ObjectKind::none:
        key.kind = Key::Kind::none;
        break;
      case ObjectKind::boolean:
        integer(self.boolean ? 1 : 0);
        break;
      case ObjectKind::integer:
        integer(self.integer);
        break;
      case ObjectKind::floating:
        if (self.floating >= -0x1p62 && self.floating <= 0x1p62 &&
            self.floating == static_cast<double>(static_cast<std::int64_t>(self.floating))) {
          integer(static_cast<std::int64_t>(self.floating));
        } else if (self.floating == self.floating) {
          key.kind = Key::Kind::floating;
          key.hash = std::bit_cast<std::uint64_t>(self.floating);
        }
        break;
      case ObjectKind::big_integer:
      case ObjectKind::str:
      case ObjectKind::bytes:
        key.kind = self.kind == ObjectKind::str     ? Key::Kind::str
                   : self.kind == ObjectKind::bytes ? Key::Kind::bytes
                                                    : Key::Kind::big_integer;
        key.text = self.text.view();
        key.hash = std::hash<std::string_view>{}(key.text);
        break;
      default:
        break;
    }
    return key;
  }
  /// Says whether a dict has few keys, all of them str and different: the attributes of an object.
  bool has_few_names(const Slice& slice) const {
    constexpr std::uint32_t kFew = 8;
    if (slice.size / 2 > kFew) return false;
    std::array<std::string_view, kFew> names;
    const std::uint32_t* links = graph_.links_.data() + slice.begin;
    for (std::uint32_t i = 0; i < slice.size / 2; ++i) {
      const Node& key = node(links[2 * i]);
      if (key.kind != ObjectKind::str) return false;
      names[i] = key.text.view();
      if (std::find(names.begin(), names.begin() + i, names[i]) != names.begin() + i) return false;
    }
    return true;
  }
  /// Gives every key its last value at its first place, as a Python dict would.
  void unite_equal_keys(Slice& slice) {
    const std::uint32_t num_entries = slice.size / 2;
    if (num_entries < 2 || has_few_names(slice)) return;
    std::uint32_t* links = graph_.links_.data() + slice.begin;
    keys_.clear();
    for (std::uint32_t i = 0; i < num_entries; ++i) keys_.push_back(key_of(links[2 * i], i));
    std::sort(keys_.begin(), keys_.end(), [](const Key& a, const Key& b) {
      if (a.hash != b.hash) return a.hash < b.hash;
      if (a.kind != b.kind) return a.kind < b.kind;
      if (a.text != b.text) return a.text < b.text;
      return a.entry < b.entry;
    });
    bool any_repeated = false;
    for (std::size_t i = 0; i < keys_.size();) {
      std::size_t last = i;
      while (last + 1 < keys_.size() && keys_[last + 1].same(keys_[i])) ++last;
      links[2 * keys_[i].entry + 1] = links[2 * keys_[last].entry + 1];
      for (std::size_t k = i + 1; k <= last; ++k) {
        links[2 * keys_[k].entry] = kNoObject;
        any_repeated = true;
      }
      i = last + 1;
    }
    if (!any_repeated) return;
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < num_entries; ++i) {
      if (links[2 * i] == kNoObject) continue;
      links[2 * kept] = links[2 * i];
      links[2 * kept + 1] = links[2 * i + 1];
      ++kept;
    }
    slice.size = 2 * kept;
  }

  const AllowList& allowed_;
  PickleLimits limits_;
  ObjectGraph graph_;
  std::uint64_t nbytes_ = 0;
  std::uint64_t position_ = 0;
  std::uint64_t opcode_position_ = 0;
  bool stopped_ = false;
  std::size_t num_pushed_ = 0;
  std::vector<std::uint32_t> stack_;
  std::vector<std::size_t> marks_;
  std::vector<std::uint32_t> memo_;
  std::size_t num_memoized_ = 0;
  std::vector<Key> keys_;
  std::uint32_t none_ = kNoObject, true_ = kNoObject, false_ = kNoObject, empty_tuple_ = kNoObject;
};

void Machine::step(unsigned char opcode) {
  switch (opcode) {
    // Frame of the program. PROTO and FRAME change nothing about what follows.
    case 0x80: {  // PROTO
      const unsigned version = take_byte("protocol");
      if (version > 5) {
        fail_expected(ErrorKind::unsupported, "pickle protocol", "at most 5",
                      std::to_string(version));
      }
      return;
    }
    case 0x95: {  // FRAME
      const auto frame_nbytes = take_little_endian<std::uint64_t>("frame length");
      if (frame_nbytes > nbytes_ - position_) {
        fail_expected(ErrorKind::corruption, "frame", std::to_string(frame_nbytes) + " bytes",
                      std::to_string(nbytes_ - position_), "cut short?");
      }
      return;
    }
    case '.': {  // STOP
      graph_.root_ = pop();
      if (!stack_.empty() || !marks_.empty()) {
        fail_expected(ErrorKind::corruption, "stack at STOP", "one object",
                      std::to_string(stack_.size() + 1));
      }
      stopped_ = true;
      return;
    }

    // Stack
    case '(':
      marks_.push_back(stack_.size());
      return;  // MARK
    case '0':  // POP
      if (!marks_.empty() && stack_.size() == marks_.back()) {
        marks_.pop_back();
      } else {
        pop();
      }
      return;
    case '1':
      stack_.resize(pop_mark());
      return;  // POP_MARK
    case '2':
      push(top());
      return;  // DUP

    // Constants and numbers
    case 'N':
      push_constant(none_, ObjectKind::none);
      return;  // NONE
    case 0x88:
      push_boolean(true);
      return;  // NEWTRUE
    case 0x89:
      push_boolean(false);
      return;  // NEWFALSE
    case 'K':
      push_integer(take_byte("integer"));
      return;  // BININT1
    case 'M':
      push_integer(take_little_endian<std::uint16_t>("integer"));
      return;  // BININT2
    case 'J':  // BININT
      push_integer(static_cast<std::int32_t>(take_little_endian<std::uint32_t>("integer")));
      return;
    case 0x8a:
      push_long(take(take_byte("integer size"), "integer"));
      return;     // LONG1
    case 0x8b: {  // LONG4
      const auto integer_nbytes = take_little_endian<std::uint32_t>("integer size");
      check_big_integer(integer_nbytes);
      push_long(take(integer_nbytes, "integer"));
      return;
    }
    case 'G': {  // BINFLOAT: big-endian
      std::uint64_t bits = 0;
      for (const char byte : take(8, "float")) bits = bits << 8 | static_cast<unsigned char>(byte);
      push_floating(std::bit_cast<double>(bits));
      return;
    }
    case 'I':
      push_int_line();
      return;  // INT
    case 'L':
      push_long_line();
      return;  // LONG
    case 'F':
      push_float_line();
      return;  // FLOAT

    // Text and bytes
    case 'X':
      push_str(take(take_little_endian<std::uint32_t>("str size"), "str"));
      return;  // BINUNICODE
    case 0x8c:
      push_str(take(take_byte("str size"), "str"));
      return;  // SHORT_BINUNICODE
    case 0x8d:
      push_str(take(take_little_endian<std::uint64_t>("str size"), "str"));
      return;  // BINUNICODE8
    case 'V':
      push_unicode_line();
      return;  // UNICODE
    case 'T':
      push_str_or_bytes(take(take_little_endian<std::uint32_t>("string size"), "string"));
      return;  // BINSTRING
    case 'U':
      push_str_or_bytes(take(take_byte("string size"), "string"));
      return;  // SHORT_BINSTRING
    case 'S':
      push_string_line();
      return;  // STRING
    case 'B':
      push_bytes(take(take_little_endian<std::uint32_t>("bytes size"), "bytes"));
      return;  // BINBYTES
    case 'C':
      push_bytes(take(take_byte("bytes size"), "bytes"));
      return;   // SHORT_BINBYTES
    case 0x8e:  // BINBYTES8
    case 0x96:  // BYTEARRAY8
      push_bytes(take(take_little_endian<std::uint64_t>("bytes size"), "bytes"));
      return;

    // Containers
    case ']':
      push_empty(ObjectKind::list);
      return;  // EMPTY_LIST
    case '}':
      push_empty(ObjectKind::dict);
      return;  // EMPTY_DICT
    case 0x8f:
      push_empty(ObjectKind::set);
      return;  // EMPTY_SET
    case ')':
      push_constant(empty_tuple_, ObjectKind::tuple);
      return;  // EMPTY_TUPLE
    case 'l':
      push_collection(ObjectKind::list, pop_mark());
      return;  // LIST
    case 't':
      push_collection(ObjectKind::tuple, pop_mark());
      return;  // TUPLE
    case 0x91:
      push_collection(ObjectKind::set, pop_mark());
      return;  // FROZENSET
    case 0x85:
      push_tuple_of(1);
      return;  // TUPLE1
    case 0x86:
      push_tuple_of(2);
      return;  // TUPLE2
    case 0x87:
      push_tuple_of(3);
      return;    // TUPLE3
    case 'd': {  // DICT
      const std::size_t begin = pop_mark();
      if ((stack_.size() - begin) % 2 != 0) {
        fail(ErrorKind::corruption, "dict entries: expected pairs, found an odd number of objects");
      }
      push_collection(ObjectKind::dict, begin);
      return;
    }
    case 'a': {  // APPEND
      const std::uint32_t item = pop();
      append_items(top(), std::span(&item, 1), ObjectKind::list);
      return;
    }
    case 'e':     // APPENDS
    case 0x90: {  // ADDITEMS
      const std::size_t begin = pop_mark();
      const std::vector<std::uint32_t>::size_type end = begin;
      if (end == floor())
        fail(ErrorKind::corruption, "stack: expected an object below the MARK, found none");
      append_items(stack_[begin - 1], above(begin),
                   opcode == 'e' ? ObjectKind::list : ObjectKind::set);
      stack_.resize(begin);
      return;
    }
    case 's': {  // SETITEM
      const std::uint32_t value = pop();
      const std::uint32_t pair[] = {pop(), value};
      set_items(top(), pair);
      return;
    }
    case 'u': {  // SETITEMS
      const std::size_t begin = pop_mark();
      if (begin == floor())
        fail(ErrorKind::corruption, "stack: expected an object below the MARK, found none");
      set_items(stack_[begin - 1], above(begin));
      stack_.resize(begin);
      return;
    }

    // Memo
    case 'q':
      put(take_byte("memo slot"));
      return;  // BINPUT
    case 'r':
      put(take_little_endian<std::uint32_t>("memo slot"));
      return;  // LONG_BINPUT
    case 'p':
      put(take_slot_line());
      return;  // PUT
    case 0x94:
      put(num_memoized_);
      return;  // MEMOIZE
    case 'h':
      get(take_byte("memo slot"));
      return;  // BINGET
    case 'j':
      get(take_little_endian<std::uint32_t>("memo slot"));
      return;  // LONG_BINGET
    case 'g':
      get(take_slot_line());
      return;  // GET

    // Names, and what the pickle wants done with them: recorded, not done
    case 'c': {  // GLOBAL
      const std::string_view module = take_line("module");
      push_global(module, take_line("name"));
      return;
    }
    case 0x93: {  // STACK_GLOBAL
      const std::uint32_t name = pop();
      const std::uint32_t module = pop();
      if (node(name).kind != ObjectKind::str || node(module).kind != ObjectKind::str) {
        fail_expected(ErrorKind::corruption, "STACK_GLOBAL", "two str",
                      describe(module) + " and " + describe(name));
      }
      push_global(node(module).text.view(), node(name).text.view());
      return;
    }
    case 'R':
      push_call("REDUCE");
      return;
    case 0x81:
      push_call("NEWOBJ");
      return;
    case 'b':
      build();
      return;    // BUILD
    case 'Q': {  // BINPERSID
      const std::uint32_t id = pop();
      push_new(ObjectKind::persistent).index = id;
      return;
    }
    case 'P': {  // PERSID
      push_str(take_line("persistent id"));
      const std::uint32_t id = pop();
      push_new(ObjectKind::persistent).index = id;
      return;
    }

    case 'i':
      refuse_opcode("INST");
    case 'o':
      refuse_opcode("OBJ");
    case 0x82:
      refuse_opcode("EXT1");
    case 0x83:
      refuse_opcode("EXT2");
    case 0x84:
      refuse_opcode("EXT4");
    case 0x92:
      refuse_opcode("NEWOBJ_EX");
    case 0x97:
      refuse_opcode("NEXT_BUFFER");
    case 0x98:
      refuse_opcode("READONLY_BUFFER");
    default:
      fail_expected(ErrorKind::corruption, "opcode", "one of pickle's",
                    "byte " + std::to_string(opcode), "no pickle?");
  }
}

ObjectGraph unpickle(std::vector<char> bytes, PickleSource source, const AllowList& allowed,
                     PickleLimits limits) {
  return Machine(std::move(bytes), std::move(source), allowed, limits).run();
}

}  // namespace tessera::formats::pickle
