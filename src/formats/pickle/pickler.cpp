#include "formats/pickle/pickler.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>
#include <vector>

#include "base/float_text.h"
#include "base/utf8.h"
#include "tessera/base/dtype.h"
#include "tessera/base/error.h"

namespace tessera::formats::pickle {
namespace {

/// Returns the shortest two's complement of a decimal integer, little-endian, as in LONG1.
std::string two_complement(std::string_view decimal) {
  const bool negative = decimal.starts_with('-');
  if (negative) decimal.remove_prefix(1);
  TESSERA_CHECK(!decimal.empty() &&
                decimal.find_first_not_of("0123456789") == std::string_view::npos);

  constexpr std::size_t kDigits = 9;
  std::vector<std::uint32_t> limbs;
  while (!decimal.empty()) {
    const std::size_t num_digits = (decimal.size() - 1) % kDigits + 1;
    std::uint64_t carry = 0;
    std::uint64_t scale = 1;
    for (const char digit : decimal.substr(0, num_digits)) {
      carry = carry * 10 + static_cast<std::uint64_t>(digit - '0');
      scale *= 10;
    }
    decimal.remove_prefix(num_digits);
    for (std::uint32_t& limb : limbs) {
      carry += std::uint64_t{limb} * scale;
      limb = static_cast<std::uint32_t>(carry);
      carry >>= 32;
    }
    if (carry != 0) limbs.push_back(static_cast<std::uint32_t>(carry));
  }
  limbs.push_back(0);  // room for the sign
  if (negative) {
    std::uint64_t carry = 1;
    for (std::uint32_t& limb : limbs) {
      carry += static_cast<std::uint32_t>(~limb);
      limb = static_cast<std::uint32_t>(carry);
      carry >>= 32;
    }
  }
  std::string bytes;
  for (const std::uint32_t limb : limbs) {
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(limb >> shift));
  }
  // A last byte that only repeats the sign of the byte before it is redundant.
  const auto is_redundant = [&] {
    const auto last = static_cast<unsigned char>(bytes.back());
    const auto before = static_cast<unsigned char>(bytes[bytes.size() - 2]);
    return last == (before >= 0x80 ? 0xFF : 0x00);
  };
  while (bytes.size() > 1 && is_redundant()) bytes.pop_back();
  return bytes;
}

/// Returns the UTF-8 text whose code points are the bytes.
std::string latin1_text(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    const auto code = static_cast<unsigned char>(byte);
    if (code < 0x80) {
      text.push_back(byte);
    } else {
      text.push_back(static_cast<char>(0xC0 | (code >> 6)));
      text.push_back(static_cast<char>(0x80 | (code & 0x3F)));
    }
  }
  return text;
}

/// Pushes the complex number `<real>,<imaginary>`. Returns false if the text is no complex number.
bool pickle_complex(Pickler& pickler, std::string_view spelled) {
  const std::size_t comma = spelled.find(',');
  if (comma == std::string_view::npos) return false;
  double numbers[2] = {};
  std::size_t i = 0;
  for (const std::string_view text : {spelled.substr(0, comma), spelled.substr(comma + 1)}) {
    const auto number = ::tessera::detail::float_from_exact_text(text);
    if (!number) return false;
    numbers[i++] = *number;
  }
  pickler.global(pickler.protocol() < 3 ? "__builtin__" : "builtins", "complex");
  pickler.real(numbers[0]);
  pickler.real(numbers[1]);
  pickler.tuple2();
  pickler.reduce();
  return true;
}

void pickle_symbol(Pickler& pickler, const std::string& name) {
  constexpr std::string_view kComplex = "complex:";
  if (name.starts_with(kComplex) &&
      pickle_complex(pickler, std::string_view(name).substr(kComplex.size()))) {
    return;
  }
  constexpr std::string_view kDevice = "device:";
  if (name.starts_with(kDevice)) {
    pickler.global("torch", "device");
    pickler.text(std::string_view(name).substr(kDevice.size()));
    pickler.tuple1();
    pickler.reduce();
    return;
  }
  if (name.starts_with("torch.")) {
    if (const auto dtype = parse_dtype(name)) {
      pickler.global("torch", dtype_name(*dtype));
      return;
    }
    for (const std::string_view layout :
         {"torch.strided", "torch.sparse_coo", "torch.sparse_csr", "torch.sparse_csc",
          "torch.sparse_bsr", "torch.sparse_bsc", "torch._mkldnn", "torch.jagged"}) {
      if (name != layout) continue;
      pickler.global("torch.serialization", "_get_layout");
      pickler.text(name);
      pickler.tuple1();
      pickler.reduce();
      return;
    }
  }
  throw Error(ErrorKind::unsupported, {}, "the constant " + printable(name) + " cannot be pickled");
}

/// `hashed`: the value is in a set or in a dict's key, where Python accepts frozensets but no sets.
enum class PickledPlace { anywhere, hashed };

struct ValuePickler {
  Pickler& pickler;
  PickledPlace place = PickledPlace::anywhere;

  void operator()(Value::None) const { pickler.none(); }
  void operator()(bool value) const { pickler.boolean(value); }
  void operator()(std::int64_t value) const { pickler.integer(value); }
  void operator()(const Value::BigInt& value) const { pickler.big_integer(value.decimal); }
  void operator()(double value) const { pickler.real(value); }
  void operator()(const std::string& value) const {
    // Checked because the Pickler would write such a str, and no reader could read it.
    if (!::tessera::detail::is_valid_python_str(value)) {
      throw Error(ErrorKind::unsupported, {},
                  "text that is not UTF-8 cannot be pickled: " + printable(value));
    }
    pickler.text(value);
  }
  void operator()(const Value::Bytes& value) const { pickler.bytes(value.data); }
  void operator()(const Value::Symbol& value) const { pickle_symbol(pickler, value.name); }
  void operator()(const Value::List& items) const { list(items); }
  void operator()(const Value::Tuple& tuple) const {
    if (tuple.items.empty()) {
      pickler.empty_tuple();
      return;
    }
    pickler.mark();
    for (const Value& item : tuple.items) pickle(item);
    pickler.tuple_from_mark();
  }
  void operator()(const Value::Set& set) const {
    for (const Value& item : set.items) require_hashable(item, "items of a set");
    pickler.global(pickler.protocol() < 3 ? "__builtin__" : "builtins",
                   place == PickledPlace::hashed ? "frozenset" : "set");
    ValuePickler{pickler, PickledPlace::hashed}.list(set.items);
    pickler.tuple1();
    pickler.reduce();
  }
  void operator()(const Value::Dict& dict) const {
    pickler.empty_dict();
    if (dict.empty()) return;
    pickler.mark();
    for (const auto& [key, value] : dict) {
      require_hashable(key, "keys of a dict");
      std::visit(ValuePickler{pickler, PickledPlace::hashed}, key.storage());
      pickle(value);
    }
    pickler.set_items_from_mark();
  }
  /// Throws for values that Python cannot hash. Accepts a set, which becomes a frozenset.
  static void require_hashable(const Value& value, std::string_view what) {
    if (value.is<Value::List>() || value.is<Value::Dict>()) {
      throw Error::expected(ErrorKind::unsupported, {}, "pickle",
                            std::string(what) + " that Python can hash",
                            "a " + std::string(type_name(value)));
    }
    if (const auto* const tuple = value.get_if<Value::Tuple>()) {
      for (const Value& item : tuple->items) require_hashable(item, what);
    }
  }
  void list(const Value::List& items) const {
    pickler.empty_list();
    if (items.empty()) return;
    pickler.mark();
    for (const Value& item : items) pickle(item);
    pickler.append_from_mark();
  }
  void pickle(const Value& value) const { std::visit(*this, value.storage()); }
};

}  // namespace

Pickler::Pickler(int protocol) : protocol_(protocol) {
  TESSERA_CHECK(protocol >= 2 && protocol <= 4);
  op(Opcode::PROTO);
  out_.push_back(static_cast<char>(protocol));
}

template <class Unsigned>
void Pickler::little_endian(Unsigned value) {
  for (std::size_t i = 0; i < sizeof(Unsigned); ++i) {
    out_.push_back(static_cast<char>(value >> (8 * i)));
  }
}

void Pickler::integer(std::int64_t value) {
  if (value >= 0 && value <= 0xFF) {
    op(Opcode::BININT1);
    out_.push_back(static_cast<char>(value));
  } else if (value >= 0 && value <= 0xFFFF) {
    op(Opcode::BININT2);
    little_endian(static_cast<std::uint16_t>(value));
  } else if (value >= std::numeric_limits<std::int32_t>::min() &&
             value <= std::numeric_limits<std::int32_t>::max()) {
    op(Opcode::BININT);
    little_endian(static_cast<std::uint32_t>(value));
  } else {
    big_integer(std::to_string(value));
  }
}

void Pickler::big_integer(std::string_view decimal) {
  const std::string bytes = two_complement(decimal);
  if (bytes.size() <= 0xFF) {
    op(Opcode::LONG1);
    out_.push_back(static_cast<char>(bytes.size()));
  } else {
    op(Opcode::LONG4);
    little_endian(static_cast<std::uint32_t>(bytes.size()));
  }
  out_ += bytes;
}

void Pickler::real(double value) {
  op(Opcode::BINFLOAT);
  const auto bits = std::bit_cast<std::uint64_t>(value);
  for (int shift = 56; shift >= 0; shift -= 8) out_.push_back(static_cast<char>(bits >> shift));
}

void Pickler::text_with_length(std::string_view utf8) {
  if (protocol_ >= 4 && utf8.size() <= 0xFF) {
    op(Opcode::SHORT_BINUNICODE);
    out_.push_back(static_cast<char>(utf8.size()));
  } else {
    TESSERA_CHECK(utf8.size() <= std::numeric_limits<std::uint32_t>::max());
    op(Opcode::BINUNICODE);
    little_endian(static_cast<std::uint32_t>(utf8.size()));
  }
  out_ += utf8;
}

void Pickler::text(std::string_view utf8) {
  text_with_length(utf8);
}

void Pickler::bytes(std::string_view data) {
  if (protocol_ < 3) {  // as Python does in protocols without bytes
    global("_codecs", "encode");
    text(latin1_text(data));
    text("latin1");
    tuple2();
    reduce();
    return;
  }
  if (data.size() <= 0xFF) {
    op(Opcode::SHORT_BINBYTES);
    out_.push_back(static_cast<char>(data.size()));
  } else {
    TESSERA_CHECK(data.size() <= std::numeric_limits<std::uint32_t>::max());
    op(Opcode::BINBYTES);
    little_endian(static_cast<std::uint32_t>(data.size()));
  }
  out_ += data;
}

void Pickler::global(std::string_view module, std::string_view name) {
  std::string key(module);
  key += '\n';
  key += name;
  if (const auto found = memo_of_global_.find(key); found != memo_of_global_.end()) {
    return get(found->second);
  }
  if (protocol_ >= 4) {
    interned(module);
    interned(name);
    op(Opcode::STACK_GLOBAL);
  } else {
    op(Opcode::GLOBAL);
    out_ += key;
    out_ += '\n';
  }
  memo_of_global_.emplace(std::move(key), memoize());
}

void Pickler::interned(std::string_view utf8) {
  if (get_interned(utf8)) return;
  text_with_length(utf8);
  memo_of_text_.emplace(utf8, memoize());
}

bool Pickler::get_interned(std::string_view utf8) {
  const auto found = memo_of_text_.find(std::string(utf8));
  if (found == memo_of_text_.end()) return false;
  get(found->second);
  return true;
}

std::size_t Pickler::memoize() {
  const std::size_t index = num_memoized_++;
  if (protocol_ >= 4) {
    op(Opcode::MEMOIZE);
  } else if (index <= 0xFF) {
    op(Opcode::BINPUT);
    out_.push_back(static_cast<char>(index));
  } else {
    op(Opcode::LONG_BINPUT);
    little_endian(static_cast<std::uint32_t>(index));
  }
  return index;
}

void Pickler::get(std::size_t memo_index) {
  if (memo_index <= 0xFF) {
    op(Opcode::BINGET);
    out_.push_back(static_cast<char>(memo_index));
  } else {
    op(Opcode::LONG_BINGET);
    little_endian(static_cast<std::uint32_t>(memo_index));
  }
}

std::string Pickler::finish() && {
  op(Opcode::STOP);
  return std::move(out_);
}

void pickle_value(Pickler& pickler, const Value& value) {
  std::visit(ValuePickler{pickler}, value.storage());
}

}  // namespace tessera::formats::pickle
