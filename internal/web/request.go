// This file owns requests: which ones are well formed, and what a handler learns of them.

package web

import (
	"bufio"
	"bytes"
	"errors"
	"strings"
)

// mostHead is the length of the longest head of a request.
const mostHead = 16 << 10

// Request is a request without its body.
type Request struct {
	Method, Path string
	Host         string // with the port if one was given

	keep   bool // the connection may serve another request
	unread bool // it may have a body, which nobody reads
}

// statusError is the status of the answer to a request that is not well formed.
type statusError int

func (e statusError) Error() string { return reasons[int(e)] }

// readRequest reads the head of a request. The error is a statusError if the head is not
// well formed, and any other if no request came.
func readRequest(in *bufio.Reader) (*Request, error) {
	var lines []string
	for left := mostHead; ; {
		line, err := in.ReadSlice('\n')
		if left -= len(line); left < 0 || errors.Is(err, bufio.ErrBufferFull) {
			return nil, statusError(headTooLarge)
		}
		if err != nil {
			return nil, err
		}
		line = bytes.TrimSuffix(line[:len(line)-1], []byte("\r"))
		if len(line) == 0 {
			return parse(lines)
		}
		lines = append(lines, string(line))
	}
}

// parse reads the lines of a head.
func parse(lines []string) (*Request, error) {
	if len(lines) == 0 {
		return nil, statusError(badRequest)
	}
	method, rest, _ := strings.Cut(lines[0], " ")
	target, version, _ := strings.Cut(rest, " ")
	switch {
	case !isToken(method) || !isVisible(target) || !strings.HasPrefix(version, "HTTP/"):
		return nil, statusError(badRequest)
	case version != "HTTP/1.1" && version != "HTTP/1.0":
		return nil, statusError(wrongVersion)
	}
	r := &Request{Method: method, keep: version == "HTTP/1.1"}
	hosts := 0
	for _, line := range lines[1:] {
		name, value, found := strings.Cut(line, ":")
		value = strings.Trim(value, " \t")
		if !found || !isToken(name) || !isText(value) {
			return nil, statusError(badRequest)
		}
		switch strings.ToLower(name) {
		case "host":
			r.Host = value
			hosts++
		case "connection":
			for option := range strings.SplitSeq(value, ",") {
				r.keep = r.keep && !strings.EqualFold(strings.Trim(option, " \t"), "close")
			}
		case "content-length":
			r.unread = r.unread || value != "0"
		case "transfer-encoding":
			r.unread = true
		}
	}
	if hosts > 1 || hosts == 0 && version == "HTTP/1.1" || r.Host != "" && !isVisible(r.Host) {
		return nil, statusError(badRequest)
	}
	// A proxy sends whole addresses. The host in one counts, and not the header.
	const scheme = "http://"
	if len(target) >= len(scheme) && strings.EqualFold(target[:len(scheme)], scheme) {
		target = target[len(scheme):]
		i := strings.IndexAny(target+"/", "/?#")
		if r.Host, target = target[:i], target[i:]; r.Host == "" || strings.Contains(r.Host, "@") {
			return nil, statusError(badRequest)
		}
	}
	r.Path, _, _ = strings.Cut(target, "?")
	r.keep = r.keep && !r.unread
	return r, nil
}

// isToken reports whether s is a token of HTTP, such as a method or the name of a header.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if (c|0x20 < 'a' || c|0x20 > 'z') && (c < '0' || c > '9') && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return s != ""
}

// isVisible reports whether s is not empty and has no space, no control character and no
// byte beyond ASCII.
func isVisible(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return s != ""
}

// isText reports whether s has no control character other than tabs.
func isText(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' && s[i] != '\t' || s[i] == 0x7f {
			return false
		}
	}
	return true
}
