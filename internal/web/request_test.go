package web

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// read returns a request, or the status that it is refused with, 0 if it has no end.
func read(text string) (*Request, int) {
	r, err := readRequest(bufio.NewReaderSize(strings.NewReader(text), mostHead))
	var status statusError
	if err != nil && !errors.As(err, &status) {
		return nil, 0
	}
	return r, int(status)
}

func TestRequests(t *testing.T) {
	const host = "\r\nHost: localhost:1\r\n\r\n"
	for text, want := range map[string]string{
		"GET / HTTP/1.1" + host:                                              "GET / localhost:1 keep",
		"GET /a?b=c HTTP/1.1\nhOST:\tx \n\n":                                 "GET /a x keep",
		"HEAD /events HTTP/1.1\r\nConnection: a, Close" + host:               "HEAD /events localhost:1",
		"GET / HTTP/1.1\r\nConnection: keep-alive" + host:                    "GET / localhost:1 keep",
		"GET / HTTP/1.0\r\n\r\n":                                             "GET / ",
		"GET / HTTP/1.1\r\nContent-Length: 0" + host:                         "GET / localhost:1 keep",
		"POST / HTTP/1.1\r\nContent-Length: 5" + host + "hello":              "POST / localhost:1 unread",
		"POST / HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 5" + host:   "POST / localhost:1 unread",
		"POST / HTTP/1.1\r\nTransfer-Encoding: chunked" + host:               "POST / localhost:1 unread",
		"GET HTTP://evil.example/x?y HTTP/1.1" + host:                        "GET /x evil.example keep",
		"GET http:// HTTP/1.1" + host:                                        "400",
		"GET http://localhost@evil.example/ HTTP/1.1" + host:                 "400",
		"GET http://evil.example?x HTTP/1.1" + host:                          "GET  evil.example keep",
		"OPTIONS * HTTP/1.1" + host:                                          "OPTIONS * localhost:1 keep",
		"GET / HTTP/1.1\r\nHost:\r\n\r\n":                                    "GET /  keep",
		"\r\n\r\n":                                                           "400",
		"GET / HTTP/1.1\r\n\r\n":                                             "400", // no host
		"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n":                       "400",
		"GET / HTTP/1.1\r\nHost: a b\r\n\r\n":                                "400",
		"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n":                               "400",
		"GET / HTTP/1.1\r\nHost : a\r\n\r\n":                                 "400",
		"GET / HTTP/1.1\r\nX: a\r\n b" + host:                                "400", // a folded line
		"GET / HTTP/1.1\r\nX: a\rb" + host:                                   "400",
		"GET / HTTP/1.1\r\nX: a\x00" + host:                                  "400",
		"GET / HTTP/1.1\r\nX" + host:                                         "400",
		"GET  / HTTP/1.1" + host:                                             "400",
		"GET /a b HTTP/1.1" + host:                                           "400",
		"G@T / HTTP/1.1" + host:                                              "400",
		"GET /\x01 HTTP/1.1" + host:                                          "400",
		"GET /" + host:                                                       "400",
		"\x16\x03\x01\x02\x00\x01\n\n":                                       "400", // TLS
		"PRI * HTTP/2.0\r\n\r\n":                                             "505",
		"GET / HTTP/1.1 " + host:                                             "505",
		"GET / HTTP/1.1\r\nX: " + strings.Repeat("x", mostHead) + host:       "431",
		"GET / HTTP/1.1\r\n" + strings.Repeat("X: x\r\n", mostHead/6) + host: "431",
		"GET / HTTP/1.1\r\nHost: localhost\r\n":                              "0",
		"":                                                                   "0",
	} {
		r, status := read(text)
		got := fmt.Sprint(status)
		if r != nil {
			got = fmt.Sprintf("%s %s %s%s%s", r.Method, r.Path, r.Host, map[bool]string{true: " keep"}[r.keep], map[bool]string{true: " unread"}[r.unread])
		}
		if got != want {
			t.Errorf("%.60q: %s, want %s", text, got, want)
		}
	}
}

// The status of a refusal has words.
func TestReasons(t *testing.T) {
	for _, status := range []statusError{badRequest, headTooLarge, wrongVersion} {
		if want := http.StatusText(int(status)); status.Error() != want {
			t.Errorf("%d: %q, want %q", int(status), status.Error(), want)
		}
	}
}

// A request that net/http can read too means the same to both.
func FuzzRequest(f *testing.F) {
	for _, seed := range []string{
		"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "GET http://a/b?c HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
		"POST /x HTTP/1.0\nContent-Length: 3\n\nabc", "GET * HTTP/1.1\r\nHost: [::1]:80\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "\r\n\r\n",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, status := read(text)
		if r == nil {
			return
		}
		if status != 0 || !isToken(r.Method) || strings.ContainsAny(r.Host+r.Path, " \t\r\n\x00") || strings.Contains(r.Path, "?") || r.keep && r.unread {
			t.Errorf("%q: %d, %+v", text, status, r)
		}
		theirs, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
		if err != nil {
			return
		}
		if r.Method != theirs.Method || r.Path == theirs.URL.Path && r.Host != theirs.Host || r.keep && theirs.Close {
			t.Errorf("%q: %+v, but net/http reads %s %q of %q, close %v", text, r, theirs.Method, theirs.URL.Path, theirs.Host, theirs.Close)
		}
		if n, _ := io.Copy(io.Discard, theirs.Body); n > 0 && !r.unread {
			t.Errorf("%q: a body of %d bytes would be read as a request", text, n)
		}
	})
}
