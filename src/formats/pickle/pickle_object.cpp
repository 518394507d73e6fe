#include "formats/pickle/pickle_object.h"

#include "base/utf8.h"

namespace tessera::formats::pickle {

std::string_view kind_name(ObjectKind kind) {
  switch (kind) {
    case ObjectKind::none:
      return "None";
    case ObjectKind::boolean:
      return "bool";
    case ObjectKind::integer:
      return "int";
    case ObjectKind::big_integer:
      return "int beyond 64 bits";
    case ObjectKind::floating:
      return "float";
    case ObjectKind::str:
      return "str";
    case ObjectKind::bytes:
      return "bytes";
    case ObjectKind::list:
      return "list";
    case ObjectKind::tuple:
      return "tuple";
    case ObjectKind::dict:
      return "dict";
    case ObjectKind::set:
      return "set";
    case ObjectKind::global:
      return "global";
    case ObjectKind::call:
      return "object";
    case ObjectKind::persistent:
      return "persistent id";
  }
  return "?";
}

bool Object::as_boolean(std::string_view rule) const {
  return node(ObjectKind::boolean, rule).boolean;
}

double Object::as_floating(std::string_view rule) const {
  return node(ObjectKind::floating, rule).floating;
}

std::string_view Object::as_str(std::string_view rule) const {
  const std::string_view text = as_text(rule);
  if (!::tessera::detail::is_valid_utf8(text)) {
    fail(ErrorKind::unsupported,
         std::string(rule) + ": expected UTF-8, found a lone surrogate in " + describe());
  }
  return text;
}

std::string_view Object::as_bytes(std::string_view rule) const {
  return node(ObjectKind::bytes, rule).text.view();
}

std::string_view Object::as_big_integer(std::string_view rule) const {
  return node(ObjectKind::big_integer, rule).text.view();
}

std::optional<Object> Object::find(std::string_view key) const {
  const std::size_t num = num_entries("attributes");
  for (std::size_t i = 0; i < num; ++i) {
    const Object candidate = entry_key(i);
    if (candidate.is(ObjectKind::str) && candidate.as_text("key") == key) return entry_value(i);
  }
  return std::nullopt;
}

std::string_view Object::global_module(std::string_view rule) const {
  return named_global(rule).module.view();
}

std::string_view Object::global_name(std::string_view rule) const {
  return named_global(rule).name.view();
}

std::size_t Object::num_appended(std::string_view rule) const {
  return call(rule).appended.size;
}

Object Object::appended(std::size_t index) const {
  return link(call("object").appended, index);
}

Object Object::persistent_id(std::string_view rule) const {
  return Object(graph_, node(ObjectKind::persistent, rule).index);
}

Error Object::error(ErrorKind error_kind, std::string_view what) const {
  ErrorWhere where{.path = graph_->path_};
  if (const std::uint32_t offset = node().offset; offset != detail::kNoObject) {
    const std::uint64_t begin = graph_->file_offset_ + offset;
    where.byte_range = ByteRange{begin, begin + 1};
  }
  return Error(error_kind, std::move(where), "pickle: " + std::string(what));
}

void Object::fail(ErrorKind error_kind, std::string_view what) const {
  throw error(error_kind, what);
}

void Object::fail_expected(std::string_view rule, std::string_view expected) const {
  fail(ErrorKind::corruption,
       std::string(rule) + ": expected " + std::string(expected) + ", found " + describe());
}

std::string Object::describe() const {
  const auto quoted = [](std::string_view text) { return "'" + printable(text, 60) + "'"; };
  const detail::Node& self = node();
  std::string kind_text(kind_name(self.kind));
  switch (self.kind) {
    case ObjectKind::none:
      return kind_text;
    case ObjectKind::boolean:
      return self.boolean ? "True" : "False";
    case ObjectKind::integer:
      return "int " + std::to_string(self.integer);
    case ObjectKind::big_integer:
      return "int " + printable(self.text.view(), 60);
    case ObjectKind::floating:
      return "float " + std::to_string(self.floating);
    case ObjectKind::str:
      return "str " + quoted(self.text.view());
    case ObjectKind::bytes:
      return "bytes of " + std::to_string(self.text.nbytes);
    case ObjectKind::list:
    case ObjectKind::tuple:
    case ObjectKind::set:
      return kind_text + " of " + std::to_string(self.slice.size);
    case ObjectKind::dict:
      return kind_text + " of " + std::to_string(self.slice.size / 2);
    case ObjectKind::global:
    case ObjectKind::call: {
      std::string name = printable(global_module("global"), 100);
      name += '.';
      name += printable(global_name("global"), 100);
      return self.kind == ObjectKind::call ? name + "(...)" : name;
    }
    case ObjectKind::persistent:
      return kind_text;
  }
  return kind_text;
}

}  // namespace tessera::formats::pickle
