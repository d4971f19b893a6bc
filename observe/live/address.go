// This file owns the address of the server: loopback, unless the caller writes out
// another one.

package live

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// parseAddress reads an address: a host and a port, or a port alone, with or without a
// colon, which stands for loopback.
func parseAddress(text string) (host string, port uint16, err error) {
	host, digits := "", text
	if strings.Contains(text, ":") {
		if host, digits, err = net.SplitHostPort(text); err != nil {
			return "", 0, fmt.Errorf("expected a port such as :8080, or a host and a port such as 0.0.0.0:8080, got %.80q", text)
		}
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("%.80q has no port from 0 to 65535; write one such as :8080, or :0 for any free port", text)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	return host, uint16(n), nil
}

// loopback reports whether a host name or address reaches this machine alone.
func loopback(host string) bool {
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// hostOf returns the host of a Host header, which may lack a port.
func hostOf(header string) string {
	if host, _, err := net.SplitHostPort(header); err == nil {
		return host
	}
	return header
}
