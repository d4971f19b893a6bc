// This file owns the address of the server: loopback, unless the caller writes out
// another one.

package live

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// parseAddress reads an address: a host and a port, or a port alone, with or without a
// colon, which stands for loopback.
func parseAddress(text string) (host string, port uint16, err error) {
	host, digits := "", text
	if strings.Contains(text, ":") {
		strange := func(r rune) bool { return r == ' ' || !unicode.IsPrint(r) }
		if host, digits, err = net.SplitHostPort(text); err != nil || strings.ContainsFunc(host, strange) {
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
	return err == nil && ip.IsLoopback()
}

// machineNames returns the names under which viewers may know this machine: the one that
// it listens on, and its host name, alone and with the domains that the machine's own
// files give it.
func machineNames(listens string, hostname func() (string, error), read func(string) ([]byte, error)) []string {
	names := []string{"localhost", listens}
	name, err := hostname()
	if err != nil || name == "" {
		return names
	}
	short, _, _ := strings.Cut(name, ".")
	names = append(names, name, short, short+".local")
	lines := func(file string, use func(key string, values []string)) {
		text, _ := read(file) // without the file there are no names in it
		for line := range strings.Lines(string(text)) {
			line, _, _ = strings.Cut(line, "#")
			if words := strings.Fields(line); len(words) > 1 {
				use(words[0], words[1:])
			}
		}
	}
	lines("/etc/resolv.conf", func(key string, domains []string) {
		for _, d := range domains {
			if key == "search" || key == "domain" {
				names = append(names, short+"."+d)
			}
		}
	})
	// A table of hosts may also list foreign names that the machine blocks.
	lines("/etc/hosts", func(_ string, hosts []string) {
		for _, h := range hosts {
			if strings.HasPrefix(h, short+".") {
				names = append(names, h)
			}
		}
	})
	return names
}

// answersTo reports whether a host is an address or one of some names. A site that has its
// own name resolve to this machine has neither.
func answersTo(names []string, host string) bool {
	if _, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")); err == nil {
		return true
	}
	return slices.ContainsFunc(names, func(name string) bool {
		return strings.EqualFold(strings.TrimSuffix(name, "."), strings.TrimSuffix(host, "."))
	}) && host != ""
}

// hostOf returns the host of a Host header, which may lack a port.
func hostOf(header string) string {
	if host, _, err := net.SplitHostPort(header); err == nil {
		return host
	}
	return header
}
