#include "object_store/s3_uploads.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <utility>

#include "object_store/url.h"
#include "object_store/xml_scan.h"

namespace tessera::object_store {
namespace {

using Call = S3Server::Call;
using Answer = S3Server::Answer;

constexpr std::string_view kPermissionToWrite =
    "to write (s3:PutObject, s3:AbortMultipartUpload, s3:ListMultipartUploadParts; s3:DeleteObject "
    "to replace)";
constexpr int kMaxMismatches = 3;            // wrong ETags before an upload fails
constexpr std::uint64_t kMaxParts = 10'000;  // of an upload, the limit of S3
constexpr int kMaxPages = 10'000;            // of a list
// The time in which S3 joins the parts of a large object.
constexpr std::chrono::seconds kMaxCompletion{600};

std::string without_quotes(std::string etag) {
  if (etag.size() >= 2 && etag.starts_with('"') && etag.ends_with('"')) {
    etag = etag.substr(1, etag.size() - 2);
  }
  return etag;
}

/// Returns the version of an object as lists show it. An ETag that is not known stays empty.
ObjectVersion version_of(std::uint64_t nbytes, const std::string& etag) {
  return {.nbytes = nbytes, .etag = etag.empty() ? etag : '"' + etag + '"'};
}

bool is_hex(std::string_view text) {
  return std::ranges::all_of(
      text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

/// Whether an ETag has the form of an MD5 digest.
bool looks_like_md5(const std::string& etag) {
  return etag.size() == 32 && is_hex(etag);
}

/// Whether the server encrypts objects with a key (SSE-KMS or the like), so that ETags are not MD5
/// digests.
bool has_other_etags(const HttpResponse& response) {
  return response.header("x-amz-server-side-encryption").starts_with("aws:kms") ||
         !response.header("x-amz-server-side-encryption-customer-algorithm").empty();
}

/// Returns the ETag that an object of these parts must have. Returns nothing if the ETags of the
/// parts are not MD5 digests.
std::optional<std::string> etag_of_parts(const std::vector<UploadedPart>& parts) {
  std::vector<std::byte> digests;
  for (const UploadedPart& part : parts) {
    if (without_quotes(part.etag) != part.md5.hex()) return std::nullopt;
    const auto bytes = std::as_bytes(std::span(part.md5.bytes));
    digests.insert(digests.end(), bytes.begin(), bytes.end());
  }
  return Md5::of(digests).hex() + "-" + std::to_string(parts.size());
}

std::string completion_in_xml(const std::vector<UploadedPart>& parts) {
  std::string xml = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
  for (const UploadedPart& part : parts) {
    std::string etag;
    for (const char c : part.etag) {
      etag += c == '"' ? "&quot;" : c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
    }
    xml += "<Part><PartNumber>" + std::to_string(part.number) + "</PartNumber><ETag>" + etag +
           "</ETag></Part>";
  }
  return xml + "</CompleteMultipartUpload>";
}

/// Calls `take` with the path and text of each XML element below the root: `Part/ETag`.
void read_answer(const std::string& url, const std::string& xml,
                 const std::function<void(std::string_view path, std::string text)>& take) {
  scan_xml(xml, url, [&](std::span<const std::string> path, std::string text) {
    std::string below;
    for (const std::string& name : path.subspan(1)) below += (below.empty() ? "" : "/") + name;
    if (!below.empty()) take(below, std::move(text));
  });
}

std::uint64_t number_in(const std::string& url, const std::string& text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && !text.empty()) return number;
  throw Error::expected(ErrorKind::corruption, {.path = url}, "answer of the server", "a number",
                        "'" + printable(text) + "'");
}

int part_number_in(const std::string& url, const std::string& text) {
  const std::uint64_t number = number_in(url, text);
  if (1 <= number && number <= kMaxParts) return static_cast<int>(number);
  throw Error::expected(ErrorKind::corruption, {.path = url}, "answer of the server",
                        "a part number from 1 to " + std::to_string(kMaxParts),
                        "'" + printable(text) + "'");
}

[[noreturn]] void refuse_long_list(const std::string& url) {
  throw Error::expected(ErrorKind::corruption, {.path = url}, "answer of the server",
                        "a list that ends", "more than " + std::to_string(kMaxPages) + " pages");
}

}  // namespace

Error S3Uploads::failure(const std::string& url, const Answer& answer,
                         std::string_view what) const {
  const HttpResponse& response = answer.response;
  if (response.status >= 300 && response.status < 500) {
    return server_.error_of(url, answer, kPermissionToWrite);
  }
  const std::string code = answer.error_code();
  return Error::expected(ErrorKind::io, {.path = url}, what, "success",
                         response.failure_in_words() + (code.empty() ? "" : " " + printable(code)));
}

/// Whether an object with this size and this ETag exists at the URL.
bool S3Uploads::holds(const std::string& url, std::uint64_t nbytes, const std::string& etag) {
  const auto found = server_.find(url);
  if (!found || found->version.nbytes != nbytes) return false;
  return without_quotes(found->version.etag) == etag;
}

/// Sends a request that makes an object. With Existing::refuse, asks the server to do so only if
/// there is no object. Some servers do not know this condition: then first checks that there is no
/// object, and sends the request without the condition.
Answer S3Uploads::send_if_free(const std::string& url, Call call, Existing existing) {
  if (existing == Existing::refuse) call.headers["if-none-match"] = "*";
  Answer answer = server_.send(url, call);
  if (answer.response.status != 501 || existing == Existing::replace) return answer;
  call.headers.erase("if-none-match");
  if (server_.find(url)) {
    answer.response.status = 412;
    return answer;
  }
  return server_.send(url, call);
}

namespace {

[[noreturn]] void refuse_existing(const std::string& url) {
  throw Error::expected(ErrorKind::already_exists, {.path = url}, "object", "no object at this URL",
                        "an object", "another program wrote it meanwhile, or an earlier run did");
}

[[noreturn]] void refuse_etag(const std::string& url, std::string_view what,
                              const std::string& expected, const std::string& found) {
  throw Error::expected(ErrorKind::io, {.path = url}, what, "ETag " + expected,
                        "ETag " + printable(found), "the bytes were damaged on their way");
}

}  // namespace

ObjectVersion S3Uploads::put(const std::string& url, std::span<const std::byte> bytes,
                             Existing existing) {
  const Md5 md5 = Md5::of(bytes);
  const Call call{.method = "PUT", .headers = {{"content-md5", md5.base64()}}, .body = bytes};
  for (int num_mismatches = 0;;) {
    const Answer answer = send_if_free(url, call, existing);
    if (answer.response.status == 412) {
      // The object may be the result of an earlier attempt that succeeded although its answer was
      // lost.
      if (holds(url, bytes.size(), md5.hex())) return version_of(bytes.size(), md5.hex());
      refuse_existing(url);
    }
    if (!answer.is_success()) throw failure(url, answer, "upload");
    const std::string etag = without_quotes(answer.response.header("etag"));
    if (!looks_like_md5(etag) || etag == md5.hex() || has_other_etags(answer.response)) {
      return version_of(bytes.size(), etag);
    }
    if (++num_mismatches == kMaxMismatches) refuse_etag(url, "upload", md5.hex(), etag);
    existing = Existing::replace;  // the object that this run has just written
  }
}

std::string S3Uploads::begin(const std::string& url) {
  const Answer answer = server_.send(url, {.method = "POST", .query = {{"uploads", ""}}});
  if (!answer.is_success()) throw failure(url, answer, "begin of an upload");
  std::string id;
  read_answer(url, answer.body, [&](std::string_view path, std::string text) {
    if (path == "UploadId") id = std::move(text);
  });
  if (id.empty()) {
    throw Error::expected(ErrorKind::io, {.path = url}, "begin of an upload", "an UploadId", "none",
                          "does the server have S3's multipart uploads?");
  }
  return id;
}

UploadedPart S3Uploads::put_part(const std::string& url, const std::string& id, int number,
                                 std::span<const std::byte> bytes) {
  const std::string what = "upload of part " + std::to_string(number);
  UploadedPart part{.number = number, .nbytes = bytes.size(), .md5 = Md5::of(bytes)};
  const Call call{.method = "PUT",
                  .query = {{"partNumber", std::to_string(number)}, {"uploadId", id}},
                  .headers = {{"content-md5", part.md5.base64()}},
                  .body = bytes};
  for (int num_mismatches = 0;;) {
    const Answer answer = server_.send(url, call);
    if (!answer.is_success()) throw failure(url, answer, what);
    part.etag = answer.response.header("etag");
    if (part.etag.empty()) {
      throw Error::expected(ErrorKind::io, {.path = url}, what, "an ETag", "none");
    }
    const std::string etag = without_quotes(part.etag);
    if (!looks_like_md5(etag) || etag == part.md5.hex() || has_other_etags(answer.response)) {
      return part;
    }
    if (++num_mismatches == kMaxMismatches) refuse_etag(url, what, part.md5.hex(), etag);
  }
}

ObjectVersion S3Uploads::complete(const std::string& url, const std::string& id,
                                  const std::vector<UploadedPart>& parts, Existing existing) {
  constexpr std::string_view kWhat = "completion of the upload";
  std::uint64_t nbytes = 0;
  for (const UploadedPart& part : parts) nbytes += part.nbytes;
  const std::string xml = completion_in_xml(parts);
  const auto expected = etag_of_parts(parts);
  const Answer answer = send_if_free(url,
                                     {.method = "POST",
                                      .query = {{"uploadId", id}},
                                      .headers = {{"content-type", "application/xml"}},
                                      .body = std::as_bytes(std::span(xml)),
                                      .max_stall = kMaxCompletion},
                                     existing);
  const int status = answer.response.status;
  if (status == 412 || (status == 404 && answer.error_code() == "NoSuchUpload")) {
    // An earlier attempt may have succeeded although its answer was lost.
    if (expected && holds(url, nbytes, *expected)) {
      abort(url, id);
      return version_of(nbytes, *expected);
    }
    if (status == 412) refuse_existing(url);
    throw Error::expected(ErrorKind::io, {.path = url}, kWhat, "the upload that was begun", "none",
                          "another program aborted it, or a rule of the bucket did");
  }
  if (!answer.is_success()) throw failure(url, answer, kWhat);
  std::string etag;
  read_answer(url, answer.body, [&](std::string_view path, std::string text) {
    if (path == "ETag") etag = without_quotes(std::move(text));
  });
  const std::string suffix = "-" + std::to_string(parts.size());
  const bool is_of_md5s = etag.size() == 32 + suffix.size() && etag.ends_with(suffix) &&
                          is_hex(std::string_view(etag).substr(0, 32));
  if (expected && is_of_md5s && etag != *expected) refuse_etag(url, kWhat, *expected, etag);
  return version_of(nbytes, etag);
}

void S3Uploads::abort(const std::string& url, const std::string& id) {
  const Answer answer = server_.send(url, {.method = "DELETE", .query = {{"uploadId", id}}});
  if (!answer.is_success() && answer.response.status != 404) {
    throw failure(url, answer, "end of an unfinished upload");
  }
}

std::vector<UploadedPart> S3Uploads::list_parts(const std::string& url, const std::string& id) {
  std::vector<UploadedPart> parts;
  Server::Query query{{"uploadId", id}};
  int num_pages = 0;
  for (;;) {
    const Answer answer = server_.send(url, {.method = "GET", .query = query});
    if (answer.response.status == 404) return {};
    if (!answer.is_success()) throw failure(url, answer, "list of the parts");
    UploadedPart part;
    std::string next;
    bool is_truncated = false;
    read_answer(url, answer.body, [&](std::string_view path, std::string text) {
      if (path == "Part/PartNumber") part.number = part_number_in(url, text);
      if (path == "Part/Size") part.nbytes = number_in(url, text);
      if (path == "Part/ETag") part.etag = std::move(text);
      if (path == "Part") parts.push_back(std::exchange(part, {}));
      if (path == "NextPartNumberMarker") next = std::move(text);
      if (path == "IsTruncated") is_truncated = text == "true";
    });
    if (!is_truncated || next.empty()) return parts;
    if (parts.size() > kMaxParts || ++num_pages == kMaxPages) refuse_long_list(url);
    query = {{"part-number-marker", next}, {"uploadId", id}};
  }
}

std::vector<UnfinishedUpload> S3Uploads::list_unfinished(const std::string& url) {
  std::vector<UnfinishedUpload> uploads;
  const Server::Query wanted{
      {"encoding-type", "url"}, {"prefix", parse_url(url).path}, {"uploads", ""}};
  Server::Query query = wanted;
  int num_pages = 0;
  for (;;) {
    const Answer answer =
        server_.send(url, {.method = "GET", .query = query, .about = Call::About::bucket});
    if (!answer.is_success()) return uploads;
    const std::size_t num_known = uploads.size();
    UnfinishedUpload upload;
    std::string next_key;
    std::string next_id;
    bool is_truncated = false;
    bool is_encoded = false;
    read_answer(url, answer.body, [&](std::string_view path, std::string text) {
      if (path == "EncodingType") is_encoded = text == "url";
      if (path == "Upload/Key") upload.key = std::move(text);
      if (path == "Upload/UploadId") upload.id = std::move(text);
      if (path == "Upload") uploads.push_back(std::exchange(upload, {}));
      if (path == "NextKeyMarker") next_key = std::move(text);
      if (path == "NextUploadIdMarker") next_id = std::move(text);
      if (path == "IsTruncated") is_truncated = text == "true";
    });
    const auto decoded = [&](const std::string& key) {
      return is_encoded ? form_decode(key).value_or(key) : key;
    };
    for (std::size_t i = num_known; i < uploads.size(); ++i) {
      uploads[i].key = decoded(uploads[i].key);
    }
    if (!is_truncated || next_key.empty()) break;
    if (++num_pages == kMaxPages) refuse_long_list(url);
    query = wanted;
    query.emplace_back("key-marker", decoded(next_key));
    query.emplace_back("upload-id-marker", next_id);
  }
  std::erase_if(uploads, [&](const UnfinishedUpload& upload) {
    return !upload.key.starts_with(parse_url(url).path);
  });
  return uploads;
}

void S3Uploads::remove(const std::string& url) {
  const Answer answer = server_.send(url, {.method = "DELETE"});
  if (!answer.is_success() && answer.response.status != 404) throw failure(url, answer, "removal");
}

}  // namespace tessera::object_store
