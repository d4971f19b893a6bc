// This file owns where a run is served: loopback, unless another address is written out.

package live

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// parseAddress reads what --serve is given: a port with or without a colon, which
// stands for loopback, or a host and a port.
func parseAddress(text string) (host string, port uint16, err error) {
	host, digits := "", text
	if strings.Contains(text, ":") {
		if host, digits, err = net.SplitHostPort(text); err != nil {
			return "", 0, fmt.Errorf("%.80q is no address; write a port such as :8080, or a host and a port such as 0.0.0.0:8080", text)
		}
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("%.80q has no port from 0 to 65535; write one such as :8080, or :0 for any that is free", text)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	return host, uint16(n), nil
}

// loopback tells whether a host's name or address reaches this machine alone.
func loopback(host string) bool {
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// hostOf is the name in a Host header, which may lack a port.
func hostOf(header string) string {
	if host, _, err := net.SplitHostPort(header); err == nil {
		return host
	}
	return header
}
