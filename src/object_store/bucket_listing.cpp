#include "object_store/bucket_listing.h"

#include <charconv>
#include <utility>

#include "object_store/url.h"
#include "object_store/xml_scan.h"
#include "tessera/base/error.h"

namespace tessera::object_store {
namespace {

/// The content of one page of a listing, before the keys are decoded.
struct RawPage {
  struct Object {
    std::string key;
    std::string nbytes;
    std::string etag;
  };
  Object object{};  // the object whose elements are being read
  std::vector<Object> objects{};
  std::vector<std::string> folders{};
  std::string encoding{};
  std::string is_truncated{};
  std::string token{};
  bool is_list = false;
};

void take_element(std::span<const std::string> path, std::string text, RawPage& page) {
  if (path.front() != "ListBucketResult") return;
  page.is_list = true;
  const std::string& name = path.back();
  if (path.size() == 2) {
    if (name == "Contents") page.objects.push_back(std::exchange(page.object, {}));
    if (name == "EncodingType") page.encoding = std::move(text);
    if (name == "IsTruncated") page.is_truncated = std::move(text);
    if (name == "NextContinuationToken") page.token = std::move(text);
    return;
  }
  if (path.size() != 3) return;
  if (path[1] == "CommonPrefixes" && name == "Prefix") page.folders.push_back(std::move(text));
  if (path[1] != "Contents") return;
  if (name == "Key") page.object.key = std::move(text);
  if (name == "Size") page.object.nbytes = std::move(text);
  if (name == "ETag") page.object.etag = std::move(text);
}

/// Checks the keys of one page and turns them into names.
class PageReader {
 public:
  PageReader(const RawPage& raw, const std::string& prefix, const std::string& where)
      : raw_(raw), prefix_(prefix), where_(where) {}

  BucketPage read() const {
    if (!raw_.is_list) refuse("<ListBucketResult>", "another element");
    BucketPage page;
    for (const RawPage::Object& object : raw_.objects) {
      const std::string name = name_of(object.key);
      if (name.empty() || name.ends_with('/')) continue;  // a placeholder object for a folder
      if (is_of_dots(name)) continue;
      require_entry_name(name);
      page.entries.push_back({name, false, nbytes_of(object), object.etag});
    }
    for (const std::string& folder : raw_.folders) {
      std::string name = name_of(folder);
      if (!name.ends_with('/'))
        refuse("a folder (common prefix) that ends with /", printable(folder));
      name.pop_back();
      if (name.empty() || is_of_dots(name)) continue;
      require_entry_name(name);
      page.entries.push_back({name, true});
    }
    if (raw_.is_truncated == "true") {
      if (raw_.token.empty()) refuse("a NextContinuationToken", "none");
      page.continuation_token = raw_.token;
    }
    return page;
  }

 private:
  [[noreturn]] void refuse(const std::string& expected, const std::string& found) const {
    throw Error::expected(ErrorKind::corruption, {.path = where_}, "list of the bucket", expected,
                          found);
  }

  static bool is_of_dots(const std::string& name) { return name == "." || name == ".."; }
  void require_entry_name(const std::string& name) const {
    if (!is_entry_name(name)) refuse("names without / and zero bytes", "'" + printable(name) + "'");
  }

  std::string name_of(const std::string& text) const {
    std::string key = text;
    if (raw_.encoding == "url") {
      auto decoded = form_decode(text);
      if (!decoded) refuse("an encoded key", printable(text));
      key = *std::move(decoded);
    }
    if (!key.starts_with(prefix_)) {
      refuse("keys that begin with '" + printable(prefix_) + "'", "'" + printable(key) + "'");
    }
    return key.substr(prefix_.size());
  }

  std::uint64_t nbytes_of(const RawPage::Object& object) const {
    std::uint64_t nbytes = 0;
    const char* end = object.nbytes.data() + object.nbytes.size();
    const auto [stop, error] = std::from_chars(object.nbytes.data(), end, nbytes);
    if (object.nbytes.empty() || error != std::errc() || stop != end) {
      refuse("a size in bytes", "'" + printable(object.nbytes) + "'");
    }
    return nbytes;
  }

  const RawPage& raw_;
  const std::string& prefix_;
  const std::string& where_;
};

}  // namespace

bool is_entry_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

BucketPage parse_bucket_page(std::string_view xml, const std::string& prefix,
                             const std::string& where) {
  RawPage raw;
  scan_xml(xml, where, [&](std::span<const std::string> path, std::string text) {
    take_element(path, std::move(text), raw);
  });
  return PageReader(raw, prefix, where).read();
}

S3ErrorBody parse_s3_error(std::string_view xml) {
  S3ErrorBody body;
  try {
    scan_xml(xml, "", [&](std::span<const std::string> path, std::string text) {
      if (path.size() != 2 || path.front() != "Error") return;
      if (path.back() == "Code") body.code = std::move(text);
      if (path.back() == "Message") body.message = std::move(text);
      if (path.back() == "Region") body.region = std::move(text);
      if (path.back() == "Endpoint") body.endpoint = std::move(text);
    });
  } catch (const Error&) {
    return {};
  }
  return body;
}

}  // namespace tessera::object_store
