// This file owns the configuration, as the caller writes it.

package session

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/policy"
)

// Config is the JSON of stowage_open; stowage.h says what the keys mean.
type Config struct {
	Device  string                   `json:"device"`
	Ordinal int                      `json:"ordinal"`
	Context uint64                   `json:"context"`
	Stream  uint64                   `json:"stream"`
	Budget  device.Bytes             `json:"budget"`
	Host    device.Bytes             `json:"host"`
	Policy  map[string]policy.Choice `json:"policy"`
	Least   device.Bytes             `json:"least"`
	Live    float64                  `json:"live"`
	Rank    int                      `json:"rank"`
	Log     bool                     `json:"log"`
}

// Parse reads a configuration.
func Parse(text []byte) (Config, error) {
	var c Config
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return c, fmt.Errorf("stowage: the configuration cannot be read: %s; see stowage.h for its keys", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := d.Token(); err != io.EOF {
		return c, fmt.Errorf("stowage: the configuration goes on behind its end; give one JSON object")
	}
	return c, c.check()
}

func (c *Config) check() error {
	switch {
	case c.Device != "cpu" && c.Device != "cuda":
		return fmt.Errorf("stowage: device %q; give \"cpu\" or \"cuda\"", c.Device)
	case c.Budget < 0 || c.Host < 0 || c.Least < 0 || c.Ordinal < 0 || c.Rank < 0:
		return fmt.Errorf("stowage: a budget of %d, host memory of %d, least of %d bytes, ordinal %d, rank %d; none may be negative", c.Budget, c.Host, c.Least, c.Ordinal, c.Rank)
	case c.Budget > 0 && len(c.Policy) > 0:
		return fmt.Errorf("stowage: a budget and a policy both decide what leaves; give one of them")
	}
	for _, name := range slices.Sorted(maps.Keys(c.Policy)) {
		if c.Policy[name] == policy.Recompute {
			return fmt.Errorf("stowage: group %q cannot be recomputed from here; use keep, offload or stash, and the framework's own checkpointing", name)
		}
	}
	if !(c.Live >= 0 && c.Live <= 1) {
		return fmt.Errorf("stowage: live is %v; give the share of rows that are live, from 0 (count them first) to 1", c.Live)
	}
	return nil
}

// names are the choices that the runtime follows: rows go to the shelf whatever it says.
func (c *Config) names() map[string]policy.Choice {
	if len(c.Policy) == 0 {
		return nil
	}
	names := map[string]policy.Choice{}
	for name, x := range c.Policy {
		if x == policy.Stash {
			x = policy.Keep
		}
		names[name] = x
	}
	return names
}
