// This file owns the configuration: how it is read and checked.

package session

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
)

// Config is the JSON of stowage_open; stowage.h documents the keys.
type Config struct {
	Device  string                   `json:"device"`
	Ordinal int                      `json:"ordinal"`
	Context uint64                   `json:"context"`
	Stream  uint64                   `json:"stream"`
	Limit   memory.Bytes             `json:"saved_limit"`
	Host    memory.Bytes             `json:"host"`
	Policy  map[string]memory.Choice `json:"policy"`
	Least   memory.Bytes             `json:"least"`
	Live    float64                  `json:"live"`
	Rank    int                      `json:"rank"`
	Log     bool                     `json:"log"`

	// Links holds the rates to host memory. If it is zero, Open measures them.
	Links memory.Links `json:"-"`
}

// Parse reads a configuration. It returns an error if a key is unknown or a value is
// out of range.
func Parse(text []byte) (Config, error) {
	var c Config
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return c, fmt.Errorf("stowage: cannot read the configuration: %s; stowage.h lists its keys", input.Plain(err))
	}
	if _, err := d.Token(); err != io.EOF {
		return c, fmt.Errorf("stowage: there is text after the configuration; give one JSON object")
	}
	return c, c.check()
}

func (c *Config) check() error {
	switch {
	case c.Device != "cpu" && c.Device != "cuda":
		return fmt.Errorf("stowage: expected the device \"cpu\" or \"cuda\", got %q", c.Device)
	case c.Limit < 0 || c.Host < 0 || c.Least < 0 || c.Ordinal < 0 || c.Rank < 0:
		return fmt.Errorf("stowage: saved_limit %d, host %d, least %d, ordinal %d and rank %d must not be negative", c.Limit, c.Host, c.Least, c.Ordinal, c.Rank)
	case c.Limit > 0 && len(c.Policy) > 0:
		return fmt.Errorf("stowage: saved_limit and policy both decide what is offloaded; give one of them")
	}
	for _, name := range slices.Sorted(maps.Keys(c.Policy)) {
		if c.Policy[name] == memory.Recompute {
			return fmt.Errorf("stowage: the runtime cannot recompute group %q; choose keep, offload or stash, or use the framework's own checkpointing", name)
		}
	}
	if !(c.Live >= 0 && c.Live <= 1) {
		return fmt.Errorf("stowage: expected live between 0 (count rows first) and 1, got %v", c.Live)
	}
	return nil
}

// moves reports whether anything may be offloaded.
func (c *Config) moves() bool { return c.Limit > 0 || len(c.Policy) > 0 }

// choices returns the policy for the runtime, which does not see rows: the session
// itself puts them into berths.
func (c *Config) choices() map[string]memory.Choice {
	if len(c.Policy) == 0 {
		return nil
	}
	names := map[string]memory.Choice{}
	for name, x := range c.Policy {
		if x == memory.Stash {
			x = memory.Keep
		}
		names[name] = x
	}
	return names
}
