#include "object_store/xml_scan.h"

#include <charconv>
#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::object_store {
namespace {

constexpr std::size_t kMaxDepth = 16;

class Scanner {
 public:
  using Take = std::function<void(std::span<const std::string>, std::string)>;

  Scanner(std::string_view text, const std::string& where, const Take& take)
      : rest_(text), where_(where), take_(take) {}

  void run() {
    while (!rest_.empty()) {
      const std::size_t tag = std::min(rest_.find('<'), rest_.size());
      add_text(rest_.substr(0, tag));
      rest_.remove_prefix(tag);
      if (rest_.empty()) break;
      if (rest_.starts_with("<?")) {
        skip_to("?>");
      } else if (rest_.starts_with("<!--")) {
        skip_to("-->");
      } else if (rest_.starts_with("<!")) {
        refuse("elements and text", "a declaration");
      } else {
        read_tag();
      }
    }
    if (!names_.empty()) refuse("the end of <" + names_.back() + ">", "the end of the text");
    if (!has_root_) refuse("an element", "none");
  }

 private:
  [[noreturn]] void refuse(const std::string& expected, const std::string& found) const {
    throw Error::expected(ErrorKind::corruption, {.path = where_}, "XML of the server", expected,
                          found);
  }

  void skip_to(std::string_view end) {
    const std::size_t place = rest_.find(end);
    if (place == std::string_view::npos) refuse("'" + std::string(end) + "'", "none");
    rest_.remove_prefix(place + end.size());
  }

  void read_tag() {
    const std::size_t end = rest_.find('>');
    if (end == std::string_view::npos) refuse("'>'", "the end of the text");
    std::string_view tag = rest_.substr(1, end - 1);
    rest_.remove_prefix(end + 1);
    if (tag.starts_with('/')) return close(tag.substr(1));
    const bool is_empty = tag.ends_with('/');
    const std::string_view name = tag.substr(0, tag.find_first_of(" \t\r\n/"));
    if (name.empty()) refuse("the name of an element", "none");
    if (names_.size() == kMaxDepth) refuse("at most 16 levels", "more");
    if (names_.empty() && std::exchange(has_root_, true)) refuse("one root element", "two");
    names_.emplace_back(name);
    texts_.emplace_back();
    if (is_empty) close(name);
  }

  void close(std::string_view name) {
    name = name.substr(0, name.find_last_not_of(" \t\r\n") + 1);
    if (names_.empty() || names_.back() != name) {
      refuse(names_.empty() ? "no end tag" : "</" + names_.back() + ">",
             "</" + std::string(name) + ">");
    }
    take_(names_, std::move(texts_.back()));
    names_.pop_back();
    texts_.pop_back();
  }

  void add_text(std::string_view text) {
    if (texts_.empty()) {
      if (text.find_first_not_of(" \t\r\n\xEF\xBB\xBF") != std::string_view::npos) {
        refuse("an element", "text outside of elements");
      }
      return;
    }
    std::string& out = texts_.back();
    while (!text.empty()) {
      const std::size_t entity = std::min(text.find('&'), text.size());
      out += text.substr(0, entity);
      text.remove_prefix(entity);
      if (text.empty()) return;
      const std::size_t end = text.find(';');
      if (end == std::string_view::npos) refuse("';' after '&'", "none");
      add_entity(text.substr(1, end - 1), out);
      text.remove_prefix(end + 1);
    }
  }

  void add_entity(std::string_view name, std::string& out) const {
    static constexpr std::pair<std::string_view, char> kEntities[] = {
        {"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}};
    for (const auto& [known, character] : kEntities) {
      if (name == known) {
        out += character;
        return;
      }
    }
    const bool is_hex = name.starts_with("#x");
    std::uint32_t code = 0;
    const std::string_view digits = name.substr(std::min<std::size_t>(is_hex ? 2 : 1, name.size()));
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), code, is_hex ? 16 : 10);
    if (!name.starts_with('#') || digits.empty() || error != std::errc() ||
        end != digits.data() + digits.size() || code == 0 || code > 0x10FFFF) {
      refuse("an entity of XML", "&" + std::string(name) + ";");
    }
    add_utf8(code, out);
  }

  static void add_utf8(std::uint32_t code, std::string& out) {
    const auto add = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
    if (code < 0x80) {
      add(code);
    } else if (code < 0x800) {
      add(0xC0 | code >> 6);
      add(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      add(0xE0 | code >> 12);
      add(0x80 | (code >> 6 & 0x3F));
      add(0x80 | (code & 0x3F));
    } else {
      add(0xF0 | code >> 18);
      add(0x80 | (code >> 12 & 0x3F));
      add(0x80 | (code >> 6 & 0x3F));
      add(0x80 | (code & 0x3F));
    }
  }

  std::string_view rest_;
  const std::string& where_;
  const Take& take_;
  std::vector<std::string> names_;
  std::vector<std::string> texts_;
  bool has_root_ = false;
};

}  // namespace

void scan_xml(std::string_view text, const std::string& where,
              const std::function<void(std::span<const std::string>, std::string)>& take) {
  Scanner(text, where, take).run();
}

}  // namespace tessera::object_store
